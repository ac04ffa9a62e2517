// The product kernel for K = 3; one file per K so that they compile side by side.
#include "kernels/exl3/exl3_cluster_cuda.cuh"
#include "kernels/exl3/exl3_gemm_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher GemmLauncherK3(int codebook, int groups, bool wide) {
  return PickGemm<3>(codebook, groups, wide);
}

const void* ClusterKernelK3(int groups) {
  return PickCluster<3>(groups);
}

}  // namespace twinspark::exl3
