// The kernel of few rows for K = 8.
#include "kernels/moe/moe_few_cuda.cuh"

namespace twinspark::exl3 {

MoeFewLauncher MoeFewLauncherK8(int codebook, int groups) {
  return PickMoeFew<8>(codebook, groups);
}

}  // namespace twinspark::exl3
