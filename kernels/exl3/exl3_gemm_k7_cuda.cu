// The product kernel for K = 7; one file per K so that they compile side by side.
#include "kernels/exl3/exl3_cluster_cuda.cuh"
#include "kernels/exl3/exl3_gemm_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher GemmLauncherK7(int codebook, int groups, bool wide) {
  return PickGemm<7>(codebook, groups, wide);
}

const void* ClusterKernelK7(int groups) {
  return PickCluster<7>(groups);
}

}  // namespace twinspark::exl3
