// The product kernel for K = 8; one file per K so that they compile side by side.
#include "kernels/exl3/exl3_gemm_cuda.cuh"

namespace twinspark::exl3 {

GemmLauncher GemmLauncherK8(int codebook) { return PickCodebook<8>(codebook); }

}  // namespace twinspark::exl3
