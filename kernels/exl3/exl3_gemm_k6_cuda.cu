// The product kernel for K = 6; one file per K so that they compile side by side.
#include "kernels/exl3/exl3_cluster_cuda.cuh"
#include "kernels/exl3/exl3_gemm_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher GemmLauncherK6(int codebook, int groups, bool wide) {
  return PickGemm<6>(codebook, groups, wide);
}

const void* ClusterKernelK6(int groups) {
  return PickCluster<6>(groups);
}

}  // namespace twinspark::exl3
