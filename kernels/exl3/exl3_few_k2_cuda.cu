// More kernels for few rows, K = 2; see exl3_gemm_k2_cuda.cu.
#include "kernels/exl3/exl3_few_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher FewLauncherK2(int groups, TaskForm form) {
  return PickFew<2>(groups, form);
}

const void* ClusterOfTwoK2(int groups) {
  return PickClusterOfTwo<2>(groups);
}

}  // namespace twinspark::exl3
