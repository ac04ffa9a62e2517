// The chunk kernel for K = 3.
#include "kernels/moe/moe_chunk_cuda.cuh"

namespace twinspark::exl3 {

int LaunchMoeChunkK3(const MoeChunkArgs& args, int grid, size_t shared_bytes, void* stream) {
  return LaunchMoeChunk<3>(args, grid, shared_bytes, stream);
}

}  // namespace twinspark::exl3
