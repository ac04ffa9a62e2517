// More kernels for few rows, K = 7; see exl3_gemm_k7_cuda.cu.
#include "kernels/exl3/exl3_few_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher FewLauncherK7(int groups, TaskForm form) {
  return PickFew<7>(groups, form);
}

const void* ClusterOfTwoK7(int groups) {
  return PickClusterOfTwo<7>(groups);
}

}  // namespace twinspark::exl3
