// The kernel of few rows for K = 5.
#include "kernels/moe/moe_few_cuda.cuh"

namespace twinspark::exl3 {

MoeFewLauncher MoeFewLauncherK5(int codebook, int groups) {
  return PickMoeFew<5>(codebook, groups);
}

}  // namespace twinspark::exl3
