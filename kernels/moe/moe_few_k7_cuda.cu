// The kernel of few rows for K = 7.
#include "kernels/moe/moe_few_cuda.cuh"

namespace twinspark::exl3 {

MoeFewLauncher MoeFewLauncherK7(int codebook, int groups) {
  return PickMoeFew<7>(codebook, groups);
}

}  // namespace twinspark::exl3
