// The product kernel for K = 8; one file per K so that they compile side by side.
#include "kernels/exl3/exl3_cluster_cuda.cuh"
#include "kernels/exl3/exl3_gemm_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher GemmLauncherK8(int codebook, int groups, bool wide) {
  return PickGemm<8>(codebook, groups, wide);
}

const void* ClusterKernelK8(int groups) {
  return PickCluster<8>(groups);
}

}  // namespace twinspark::exl3
