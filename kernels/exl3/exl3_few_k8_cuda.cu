// More kernels for few rows, K = 8; see exl3_gemm_k8_cuda.cu.
#include "kernels/exl3/exl3_few_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher FewLauncherK8(int groups, TaskForm form) {
  return PickFew<8>(groups, form);
}

const void* ClusterOfTwoK8(int groups) {
  return PickClusterOfTwo<8>(groups);
}

}  // namespace twinspark::exl3
