// More kernels for few rows, K = 6; see exl3_gemm_k6_cuda.cu.
#include "kernels/exl3/exl3_few_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher FewLauncherK6(int groups, TaskForm form) {
  return PickFew<6>(groups, form);
}

const void* ClusterOfTwoK6(int groups) {
  return PickClusterOfTwo<6>(groups);
}

}  // namespace twinspark::exl3
