// Host helper: launch a kernel with programmatic dependent launch, so that it may start its
// constant prologue while the previous kernel of the stream drains. Every kernel launched through
// it calls device::WaitForPrevious before it touches anything another kernel writes.
#pragma once

#include <cstddef>

#include <cuda_runtime.h>

namespace twinspark {

template <class... Params, class... Args>
cudaError_t LaunchDependent(void (*kernel)(Params...),
                            int64_t grid,
                            int block,
                            size_t shared_bytes,
                            void* stream,
                            Args&&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
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

}  // namespace twinspark
