// Embedding rows, copied to every residual stream (model specification 3.1): out[t, c * d + j] =
// table[id[t] - first_id][j]. Ids outside [first_id, first_id + table.rows) give zeros, so that
// ranks which hold slices of the vocabulary can add their results.
#pragma once

#include <cstdint>

#include "kernels/launch.h"
#include "kernels/tensor_view.h"

namespace twinspark {

struct EmbedParams {
  ConstTensorView table;         // [vocab slice, d], kF32 or kBf16
  const int32_t* ids = nullptr;  // [num_rows]
  int64_t first_id = 0;
  int num_copies = 1;
  TensorView out;  // [num_rows, num_copies * d], kF32 or kBf16
};

void EmbedCpu(const EmbedParams& params, const Launch& launch);

}  // namespace twinspark
