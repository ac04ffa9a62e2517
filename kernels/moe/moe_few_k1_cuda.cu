// The kernel of few rows for K = 1.
#include "kernels/moe/moe_few_cuda.cuh"

namespace twinspark::exl3 {

MoeFewLauncher MoeFewLauncherK1(int codebook, int groups) {
  return PickMoeFew<1>(codebook, groups);
}

}  // namespace twinspark::exl3
