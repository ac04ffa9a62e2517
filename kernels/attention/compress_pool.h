// The compressor's pooling (model specification 3.5): per channel, a softmax over the gate scores
// of the `ratio` tokens of a group weighs their values. Projections before it, and norm, rope,
// quantiser and store after it, are the ordinary ops. Input rows hold [values | scores]. Rows of
// earlier steps come from the carry ring, an f32 CacheRows addressed by position (StoreRows writes
// it), so nothing needs to be undone when drafts are rejected.
#pragma once

#include <cstdint>

#include "kernels/launch.h"
#include "kernels/quant/cache_format.h"
#include "kernels/tensor_view.h"

namespace twinspark {

struct CompressPoolParams {
  ConstTensorView kv_score;  // [num_step_rows, 2 * n], kF32: values, then gate scores
  CacheRows carry = {};      // kF32, cols = 2 * n
  int ratio = 0;
  // [num_groups * ratio], tokens of each group in order: i >= 0 is row i of kv_score, i < 0 is row
  // -1 - i of carry.
  const int64_t* sources = nullptr;
  TensorView out;  // [num_groups, n], kF32 or kBf16 (the rounding before the norm)
};

void CompressPoolCpu(const CompressPoolParams& params, const Launch& launch);

}  // namespace twinspark
