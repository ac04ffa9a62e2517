// Sparse attention with a sink, keys = values = stored rows (model specification 3.7; the draft
// network's block attention is the same core, dspark specification 1.4). A query row sees, in this
// order (which is the accumulation order):
//   1. ring rows of positions [ring_begin, ring_end) of its sequence,
//   2. rows of this step, step_rows[step_begin .. step_end),
//   3. compressed rows selected[t][0 .. num_selected[t]) through its sequence's block table.
// Backbone: 1 and 2 together are positions max(0, p - window + 1) .. p. Rows of the step may
// already be in the ring (write before read; then 2 is empty) or not (long chunks): the bits are
// the same. Draft block: 1 = the last committed positions, 2 = all rows of the block, no mask. Rows
// of different sequences may be mixed; neighbouring rows of one sequence share decoded keys.
//
//   s_k = (q . k) * scale;  M = max(all s_k, sink);  e_k = exp(s_k - M)
//   out = round( sum_k e'_k * k / (sum_k e_k + exp(sink - M)) ),  e' = bf16(e) if
//   round_probabilities
// A row without keys yields zeros.
#pragma once

#include <cstdint>

#include "kernels/launch.h"
#include "kernels/quant/cache_format.h"
#include "kernels/tensor_view.h"

namespace twinspark {

// The same for every layer of a step, so it is filled once per step.
struct AttentionRow {
  int64_t ring_first_row = 0;  // slot * ring_slots: where the sequence's ring begins in `ring`
  int64_t ring_begin = 0;      // absolute positions, at most ring_slots of them
  int64_t ring_end = 0;
  int64_t step_begin = 0;  // row indices into step_rows
  int64_t step_end = 0;
  const int32_t* pages = nullptr;  // logical page -> physical page; may be null without selection
};

struct AttentionParams {
  ConstTensorView q;                   // [num_rows, num_heads * head_dim], roped, kF32 or kBf16
  const AttentionRow* rows = nullptr;  // [num_rows]
  const float* sink = nullptr;         // [num_heads]
  int num_heads = 0;
  int head_dim = 0;
  float scale = 0;  // head_dim^-0.5
  bool round_probabilities = false;

  CacheRows ring;  // cols = head_dim; all slots of this layer
  int64_t ring_slots = 0;
  CacheRows step_rows = {};  // cols = head_dim; data may be null when no row uses it

  CacheRows compressed = {};  // cols = head_dim; data null in layers without compressed rows
  int rows_per_page = 0;
  ConstTensorView selected = {};          // [num_rows, max_selected], kI32, group indices; or null
  const int32_t* num_selected = nullptr;  // [num_rows]

  TensorView out;  // [num_rows, num_heads * head_dim], kF32 or kBf16
};

void AttentionCpu(const AttentionParams& params, const Launch& launch);

// Scratch that AttentionCpu takes from the arena at most: for `max_keys` keys per row (window +
// selected) and `num_threads`.
int64_t AttentionScratchBytesCpu(int64_t max_keys, int num_heads, int head_dim, int num_threads);

}  // namespace twinspark
