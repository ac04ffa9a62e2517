// Small helpers of CPU ops: cutting rows over the pool of a launch, and turning the dtype of a view
// into a type.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/check.h"
#include "kernels/dtype.h"
#include "kernels/launch.h"

namespace twinspark {

// Rows that are worth a thread of their own, from a rough cost per row: waking and joining the pool
// takes about half a microsecond, so a range should take a few. Only speed depends on it.
inline int64_t RowGrain(double ns_per_row) {
  constexpr double kNsPerRange = 2000;
  return std::clamp(static_cast<int64_t>(kNsPerRange / ns_per_row), int64_t{1}, int64_t{4096});
}

// fn(begin, end, thread_idx); inline when the launch has no pool or there is too little to share.
template <class Fn>
void ParallelRows(const Launch& launch, int64_t num_rows, int64_t grain, const Fn& fn) {
  if (num_rows <= 0) return;
  if (launch.pool == nullptr || num_rows <= grain) {
    fn(int64_t{0}, num_rows, 0);
    return;
  }
  launch.pool->ParallelFor(num_rows, grain, fn);
}

inline int NumThreads(const Launch& launch) {
  return launch.pool == nullptr ? 1 : launch.pool->num_threads();
}

// Calls fn with a null pointer of the element type: fn(static_cast<Bf16*>(nullptr)). Inlined
// always, as what fn refers to would otherwise be written to memory and read back in other pieces,
// which takes longer than a short row.
template <class Fn>
[[gnu::always_inline]] inline void WithFloatType(DType dtype, const Fn& fn) {
  switch (dtype) {
    case DType::kF32:
      return fn(static_cast<float*>(nullptr));
    case DType::kBf16:
      return fn(static_cast<Bf16*>(nullptr));
    default:
      CHECK(false) << "activations are f32 or bf16, not " << DTypeName(dtype);
  }
}

}  // namespace twinspark
