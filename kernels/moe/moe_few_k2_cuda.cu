// The kernel of few rows for K = 2.
#include "kernels/moe/moe_few_cuda.cuh"

namespace twinspark::exl3 {

MoeFewLauncher MoeFewLauncherK2(int codebook, int groups) {
  return PickMoeFew<2>(codebook, groups);
}

}  // namespace twinspark::exl3
