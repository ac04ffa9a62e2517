// The kernel of few rows for K = 3.
#include "kernels/moe/moe_few_cuda.cuh"

namespace twinspark::exl3 {

MoeFewLauncher MoeFewLauncherK3(int codebook, int groups) {
  return PickMoeFew<3>(codebook, groups);
}

}  // namespace twinspark::exl3
