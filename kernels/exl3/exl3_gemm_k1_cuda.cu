// The product kernel for K = 1; one file per K so that they compile side by side.
#include "kernels/exl3/exl3_cluster_cuda.cuh"
#include "kernels/exl3/exl3_gemm_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher GemmLauncherK1(int codebook, int groups, bool wide) {
  return PickGemm<1>(codebook, groups, wide);
}

const void* ClusterKernelK1(int groups) {
  return PickCluster<1>(groups);
}

}  // namespace twinspark::exl3
