// More kernels for few rows, K = 1; see exl3_gemm_k1_cuda.cu.
#include "kernels/exl3/exl3_few_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher FewLauncherK1(int groups, TaskForm form) {
  return PickFew<1>(groups, form);
}

const void* ClusterOfTwoK1(int groups) {
  return PickClusterOfTwo<1>(groups);
}

}  // namespace twinspark::exl3
