// What the CUDA module offers to the process that opens it: one exported function that returns a
// table. The module is a shared object opened at run time (cuda_loader.h), with the CUDA runtime
// linked in, so a machine without a GPU, a driver or the module runs the CPU backend. Plain structs
// and pointers only: no Abseil, no exceptions, no CUDA headers. A change of any struct reached from
// here is a new version.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/workspace_cuda.h"
#include "kernels/exl3/exl3_linear_cuda.h"
#include "kernels/moe/moe_cuda.h"

namespace twinspark {

inline constexpr int kCudaInterfaceVersion = 3;

struct CudaModule {
  int version;  // kCudaInterfaceVersion of the module

  // Fills `device` for GPU `index`; code > 0 with the driver's words if there is none. Asks the
  // driver what fits the GPU, which creates its context; the current GPU stays what it was.
  CudaStatus (*query_device)(int index, CudaDevice* device);

  // Device memory of the current GPU, zeroed; what it is for is the caller's business.
  CudaStatus (*allocate)(size_t bytes, void** memory);
  CudaStatus (*release)(void* memory);
  // Between host and device in either direction, or on the device: waits for all work queued
  // before and returns when the bytes are there. For loading and tests, not for a step.
  CudaStatus (*copy)(void* to, const void* from, size_t bytes);

  int (*exl3_segments)(int k, int num_units);
  size_t (*exl3_linear_workspace)(const Exl3LinearCudaParams&, const CudaDevice&, int rows);
  CudaStatus (*exl3_linear)(const Exl3LinearCudaParams&,
                            const CudaDevice&,
                            const CudaWorkspace&,
                            void* stream);
  CudaStatus (*exl3_prepare)(const void* stored,
                             int stored_n,
                             int first_column,
                             int k,
                             int n,
                             int bits,
                             void* prepared,
                             void* stream);
  CudaStatus (*exl3_reconstruct)(const Exl3ReconstructCudaParams&, void* stream);
  size_t (*moe_workspace)(const MoeCudaParams&, int rows);
  CudaStatus (*moe)(const MoeCudaParams&, const CudaDevice&, const CudaWorkspace&, void* stream);
};

// The module's only symbol. Null if `version` is not its own.
using CudaModuleFactory = const CudaModule* (*)(int version);
inline constexpr char kCudaModuleFactoryName[] = "TwinsparkCudaModule";

}  // namespace twinspark
