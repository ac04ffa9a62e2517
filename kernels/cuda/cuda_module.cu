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
  device->compute_capability = 10 * prop.major + prop.minor;
  int current = 0;
  if (cudaGetDevice(&current) == cudaSuccess && cudaSetDevice(index) == cudaSuccess) {
    Exl3ClusterPlaces(device);
    cudaSetDevice(current);
  }
  return {};
}

CudaStatus Checked(cudaError_t error, const char* what, size_t bytes) {
  if (error == cudaSuccess) return {};
  return CudaError(error, "%s, %zu bytes: %s", what, bytes, cudaGetErrorString(error));
}

CudaStatus Allocate(size_t bytes, void** memory) {
  CudaStatus status = Checked(cudaMalloc(memory, bytes), "allocate device memory", bytes);
  if (status.ok()) status = Checked(cudaMemset(*memory, 0, bytes), "clear device memory", bytes);
  return status;
}

CudaStatus Release(void* memory) {
  return Checked(cudaFree(memory), "release device memory", 0);
}

CudaStatus Copy(void* to, const void* from, size_t bytes) {
  CudaStatus status = Checked(cudaDeviceSynchronize(), "wait before a copy", bytes);
  if (status.ok()) status = Checked(cudaMemcpy(to, from, bytes, cudaMemcpyDefault), "copy", bytes);
  return status;
}

constexpr CudaModule kModule = {.version = kCudaInterfaceVersion,
                                .query_device = &QueryDevice,
                                .allocate = &Allocate,
                                .release = &Release,
                                .copy = &Copy,
                                .exl3_segments = &Exl3Segments,
                                .exl3_linear_workspace = &Exl3LinearWorkspaceBytes,
                                .exl3_linear = &Exl3LinearCuda,
                                .exl3_prepare = &Exl3PrepareCuda,
                                .exl3_reconstruct = &Exl3ReconstructCuda,
                                .moe_workspace = &MoeCudaWorkspaceBytes,
                                .moe = &MoeCuda};

}  // namespace
}  // namespace twinspark

extern "C" __attribute__((visibility("default"))) const twinspark::CudaModule* TwinsparkCudaModule(
    int version) {
  return version == twinspark::kCudaInterfaceVersion ? &twinspark::kModule : nullptr;
}
