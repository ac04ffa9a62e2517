// Arguments of the product kernel of large chunks (moe_chunk_cuda.cuh) and its launch functions,
// one per K. Plain structs, no CUDA types beyond pointers to device memory. The order of
// accumulation is that of exl3_gemm_cuda.h, so the bits are those of every other path.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/exl3/exl3_gemm_cuda.h"

namespace twinspark::exl3 {

inline constexpr int kChunkK = 64;            // inputs of a ring stage
inline constexpr int kChunkAtomBytes = 1024;  // 8 rows x 64 inputs
inline constexpr int kChunkTileGroups = 12;   // rows that share a decoded tile, in groups of 8
inline constexpr int kChunkConsumers = 512;   // four warpgroups, 256 outputs

// Where a sorted position lives.
struct MoePlace {
  int32_t expert;
  int32_t first_group, num_groups, row;  // of its entry; row in the entry
};

// Rotated inputs of a chunk: for each entry [k / 64][group][atom], entries one behind the other by
// `MoeEntry::group`.
struct MoeChunkArgs {
  int32_t down;        // 0: gate and up of 128 channels of an entry; 1: two blocks of 128 of down
  int32_t steps;       // k / 64
  int32_t num_blocks;  // n / 128
  int32_t num_segments;
  uint16_t segment_begin[kMaxSegments + 1];  // in steps
  FastDivisor by_tasks;                      // of an entry
  int32_t num_stages, stage_bytes, input_offset, input_bytes;
  int32_t z_offset, second_z;  // bytes; floats from the first 128 outputs to the second
  const MoeExpert* experts;
  const MoeEntry* entries;
  const int32_t* num_entries;
  uint32_t* counters;  // [2], zero before and after: tasks taken, blocks done
  const void* xh;
  int64_t up_offset;  // bytes from gate's inputs to up's
  // gate and up
  float limit;
  int32_t round_gate_up, round_activation;
  int32_t down_steps;
  void* xh_down;
  // down
  const int32_t* order;  // sorted position -> slot
  float* slot_out;       // [slots, n]
};

// Returns a cudaError_t. Compute capability 9.0 only (the kernel stops elsewhere).
using MoeChunkLauncher = int (*)(const MoeChunkArgs& args,
                                 int grid,
                                 size_t shared_bytes,
                                 void* stream);

int LaunchMoeChunkK1(const MoeChunkArgs& args, int grid, size_t shared_bytes, void* stream);
int LaunchMoeChunkK2(const MoeChunkArgs& args, int grid, size_t shared_bytes, void* stream);
int LaunchMoeChunkK3(const MoeChunkArgs& args, int grid, size_t shared_bytes, void* stream);
int LaunchMoeChunkK4(const MoeChunkArgs& args, int grid, size_t shared_bytes, void* stream);
int LaunchMoeChunkK5(const MoeChunkArgs& args, int grid, size_t shared_bytes, void* stream);
int LaunchMoeChunkK6(const MoeChunkArgs& args, int grid, size_t shared_bytes, void* stream);
int LaunchMoeChunkK7(const MoeChunkArgs& args, int grid, size_t shared_bytes, void* stream);
int LaunchMoeChunkK8(const MoeChunkArgs& args, int grid, size_t shared_bytes, void* stream);

}  // namespace twinspark::exl3
