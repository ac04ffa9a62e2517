// The product kernel for K = 4; one file per K so that they compile side by side.
#include "kernels/exl3/exl3_cluster_cuda.cuh"
#include "kernels/exl3/exl3_gemm_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher GemmLauncherK4(int codebook, int groups, bool wide) {
  return PickGemm<4>(codebook, groups, wide);
}

const void* ClusterKernelK4(int groups) {
  return PickCluster<4>(groups);
}

}  // namespace twinspark::exl3
