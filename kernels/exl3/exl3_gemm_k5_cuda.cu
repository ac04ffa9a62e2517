// The product kernel for K = 5; one file per K so that they compile side by side.
#include "kernels/exl3/exl3_cluster_cuda.cuh"
#include "kernels/exl3/exl3_gemm_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher GemmLauncherK5(int codebook, int groups, bool wide) {
  return PickGemm<5>(codebook, groups, wide);
}

const void* ClusterKernelK5(int groups) {
  return PickCluster<5>(groups);
}

}  // namespace twinspark::exl3
