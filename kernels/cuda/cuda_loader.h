// Opens the CUDA module at run time. A failure is a sentence, not an error: the caller logs it and
// uses the CPU, or exits if the user asked for CUDA. Called once at start by shard_worker.
#pragma once

#include <string>

#include "absl/status/statusor.h"

#include "kernels/cuda/cuda_module.h"

namespace twinspark {

// `path`: a file, or a bare name that the dynamic linker looks for. The module stays loaded for the
// life of the process (its kernels are registered with the driver). Thread-safe.
absl::StatusOr<const CudaModule*> OpenCudaModule(const std::string& path);

}  // namespace twinspark
