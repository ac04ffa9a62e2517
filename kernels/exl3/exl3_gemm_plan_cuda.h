// Host-side choices that the linear and the mixture of experts share: how a block's shared memory
// is laid out. Nothing here changes results.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/workspace_cuda.h"
#include "kernels/exl3/exl3_gemm_cuda.h"

namespace twinspark::exl3 {

inline constexpr int kMaxFewRows = 48;  // of the paths of LinearPath

// Without clusters: rows up to which blocks rotate their own inputs, and the shared memory it may
// take.
inline constexpr int kResidentRows = 4;
inline constexpr size_t kResidentLimit = 60 * 1024;

// Fills the ring and offset fields of `args`. `longest_pairs`: of a task, for resident inputs.
// args->ahead_stages: how many may be decoded ahead; in the end how many are (0 needs no cuts).
CudaStatus LayOutShared(const CudaDevice& device,
                        int bits,
                        int kernel_groups,
                        int longest_pairs,
                        GemmArgs* args,
                        size_t* shared_bytes);

// The same for clusters; `longest_pairs`: of a segment. Fills `blocks_per_sm` too.
CudaStatus LayOutCluster(const CudaDevice& device,
                         int bits,
                         int kernel_groups,
                         int longest_pairs,
                         GemmArgs* args,
                         size_t* shared_bytes,
                         int* blocks_per_sm);

// Launches `grid` blocks in clusters of `cluster` with programmatic dependent launch; a
// cudaError_t.
int LaunchCluster(const void* kernel,
                  const GemmArgs& args,
                  int grid,
                  int cluster,
                  size_t shared_bytes,
                  void* stream);

// Fills the segment table and the divisors from the counts; call when those are final.
CudaStatus FinishArgs(GemmArgs* args);

// Blocks of the product kernel that fit an SM.
int BlocksPerSm(const CudaDevice& device, int kernel_groups, size_t shared_bytes);

}  // namespace twinspark::exl3
