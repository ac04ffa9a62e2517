// More kernels for few rows, K = 4; see exl3_gemm_k4_cuda.cu.
#include "kernels/exl3/exl3_few_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher FewLauncherK4(int groups, TaskForm form) {
  return PickFew<4>(groups, form);
}

const void* ClusterOfTwoK4(int groups) {
  return PickClusterOfTwo<4>(groups);
}

}  // namespace twinspark::exl3
