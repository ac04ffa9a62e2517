// The kernel of few rows for K = 6.
#include "kernels/moe/moe_few_cuda.cuh"

namespace twinspark::exl3 {

MoeFewLauncher MoeFewLauncherK6(int codebook, int groups) {
  return PickMoeFew<6>(codebook, groups);
}

}  // namespace twinspark::exl3
