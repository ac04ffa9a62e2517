// Launches of the products of a large chunk on compute capability 9.0: rotate, gate/up with
// activation, down. Sorting before and the sum after are those of every chunk (moe_cuda.cu).
#pragma once

#include <cstdint>

#include "kernels/cuda/workspace_cuda.h"
#include "kernels/moe/moe_chunk_cuda.h"
#include "kernels/moe/moe_cuda.h"

namespace twinspark {

// Device memory of a sorted chunk.
struct MoeChunkBuffers {
  const exl3::MoeEntry* entries;  // at most kChunkTileGroups groups each
  const int32_t* num_entries;
  const int32_t* order;
  const exl3::MoePlace* places;
  int64_t group_capacity;  // groups of 8 rows
  void* xh;                // gate's rotated inputs, then up's
  void* xh_down;
  float* slot_out;     // may be xh: written when gate and up are done
  uint32_t* counters;  // zero
};

// Whether this kernel can run the call; a function of shape and device.
bool MoeChunkFits(const MoeCudaParams& params,
                  const CudaDevice& device,
                  const exl3::GemmArgs& gate_up,
                  const exl3::GemmArgs& down);

// `gate_up` and `down` give the cuts (FinishArgs done).
CudaStatus RunMoeChunkProducts(const MoeCudaParams& params,
                               const CudaDevice& device,
                               const exl3::GemmArgs& gate_up,
                               const exl3::GemmArgs& down,
                               const MoeChunkBuffers& buffers,
                               void* stream);

}  // namespace twinspark
