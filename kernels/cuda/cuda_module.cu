// The table of the CUDA module; see cuda_module.h.
#include "kernels/cuda/cuda_module.h"

#include <cuda_runtime.h>

namespace twinspark {
namespace {

CudaStatus QueryDevice(int index, CudaDevice* device) {
  cudaDeviceProp prop{};
  const cudaError_t error = cudaGetDeviceProperties(&prop, index);
  if (error != cudaSuccess) {
    return CudaError(error, "GPU %d: %s", index, cudaGetErrorString(error));
  }
  if (prop.major < 9) {
    return CudaError(-1, "GPU %d (%s) has compute capability %d.%d; the kernels need 9.0", index,
                     prop.name, prop.major, prop.minor);
  }
  device->num_sms = prop.multiProcessorCount;
  device->shared_bytes_per_sm = prop.sharedMemPerMultiprocessor;
  device->shared_bytes_per_block = prop.sharedMemPerBlockOptin;
  return {};
}

constexpr CudaModule kModule = {kCudaInterfaceVersion,     &QueryDevice,           &Exl3Segments,
                                &Exl3LinearWorkspaceBytes, &Exl3LinearCuda,        &Exl3PrepareCuda,
                                &Exl3ReconstructCuda,      &MoeCudaWorkspaceBytes, &MoeCuda};

}  // namespace
}  // namespace twinspark

extern "C" __attribute__((visibility("default"))) const twinspark::CudaModule* TwinsparkCudaModule(
    int version) {
  return version == twinspark::kCudaInterfaceVersion ? &twinspark::kModule : nullptr;
}
