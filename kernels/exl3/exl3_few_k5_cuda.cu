// More kernels for few rows, K = 5; see exl3_gemm_k5_cuda.cu.
#include "kernels/exl3/exl3_few_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher FewLauncherK5(int groups, TaskForm form) {
  return PickFew<5>(groups, form);
}

const void* ClusterOfTwoK5(int groups) {
  return PickClusterOfTwo<5>(groups);
}

}  // namespace twinspark::exl3
