// Host helper: launch a kernel with programmatic dependent launch, so that it may start its
// constant prologue while the previous kernel of the stream drains. Every kernel launched through
// it calls device::WaitForPrevious before it touches anything another kernel writes.
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

namespace twinspark {

template <class... Params, class... Args>
cudaError_t LaunchDependent(void (*kernel)(Params...),
                            dim3 grid,
                            int block,
                            size_t shared_bytes,
                            void* stream,
                            Args&&... args) {
  // As much shared memory as the product kernels want: an SM that is set up otherwise takes none of
  // their blocks before it is empty.
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                           cudaSharedmemCarveoutMaxShared);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(block));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

template <class... Params, class... Args>
cudaError_t LaunchDependent(void (*kernel)(Params...),
                            int64_t grid,
                            int block,
                            size_t shared_bytes,
                            void* stream,
                            Args&&... args) {
  return LaunchDependent(kernel, dim3(static_cast<unsigned>(grid)), block, shared_bytes, stream,
                         static_cast<Args&&>(args)...);
}

}  // namespace twinspark
