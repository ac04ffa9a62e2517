// The kernel of few rows for K = 4.
#include "kernels/moe/moe_few_cuda.cuh"

namespace twinspark::exl3 {

MoeFewLauncher MoeFewLauncherK4(int codebook, int groups) {
  return PickMoeFew<4>(codebook, groups);
}

}  // namespace twinspark::exl3
