// Where and with what an op runs: the second argument of every op. No CUDA header here, so a
// CPU-only build compiles every caller. CPU ops use `pool` and `arena`; CUDA ops use `cuda_stream`
// (a cudaStream_t) and `arena` (device memory). An op allocates nothing else. Not thread-safe: one
// launch context per forward pass.
#pragma once

#include "kernels/arena.h"
#include "kernels/thread_pool.h"

namespace twinspark {

struct Launch {
  ThreadPool* pool = nullptr;
  Arena* arena = nullptr;
  void* cuda_stream = nullptr;
};

}  // namespace twinspark
