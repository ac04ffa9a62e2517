// The product kernel for K = 2; one file per K so that they compile side by side.
#include "kernels/exl3/exl3_cluster_cuda.cuh"
#include "kernels/exl3/exl3_gemm_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher GemmLauncherK2(int codebook, int groups, bool wide) {
  return PickGemm<2>(codebook, groups, wide);
}

const void* ClusterKernelK2(int groups) {
  return PickCluster<2>(groups);
}

}  // namespace twinspark::exl3
