// More kernels for few rows, K = 3; see exl3_gemm_k3_cuda.cu.
#include "kernels/exl3/exl3_few_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher FewLauncherK3(int groups, TaskForm form) {
  return PickFew<3>(groups, form);
}

const void* ClusterOfTwoK3(int groups) {
  return PickClusterOfTwo<3>(groups);
}

}  // namespace twinspark::exl3
