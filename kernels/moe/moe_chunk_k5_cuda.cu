// The chunk kernel for K = 5.
#include "kernels/moe/moe_chunk_cuda.cuh"

namespace twinspark::exl3 {

int LaunchMoeChunkK5(const MoeChunkArgs& args, int grid, size_t shared_bytes, void* stream) {
  return LaunchMoeChunk<5>(args, grid, shared_bytes, stream);
}

}  // namespace twinspark::exl3
