// Index scores and the two-level choice of compressed rows (model specification 3.6):
//   score[t, g] = sum_h weight[t, h] * max(0, q[t, h] . key[g])            g < num_visible[t]
// all in f32, heads in ascending order.
//   kPlain    selected = the top_k best groups
//   kProduce  also publishes candidates: the candidate_top best blocks of candidate_block groups by
//             their best score, the block of the newest visible group always among them; its own
//             selection is not restricted
//   kConsume  only groups in the row's candidate blocks take part
// Ties: lower index first. Lists come out in ascending order; masked groups never fill them up.
// A row's result depends on its own q, weights, keys and candidates only. Memory is bounded by
// top_k and candidate_top, not by the context: scores are streamed.
#pragma once

#include <cstdint>

#include "kernels/launch.h"
#include "kernels/quant/cache_format.h"
#include "kernels/tensor_view.h"

namespace twinspark {

struct IndexRow {
  const int32_t* pages = nullptr;  // logical page -> physical page
  int64_t num_visible = 0;         // complete groups: (position + 1) / ratio
};

struct IndexSelectParams {
  enum class Mode { kPlain, kProduce, kConsume };

  ConstTensorView q;        // [num_rows, num_heads * dim], roped and quantised, kF32 or kBf16
  ConstTensorView weights;  // [num_rows, num_heads], kF32 or kBf16
  float weight_scale = 1;   // multiplies the weights in f32 first
  const IndexRow* rows = nullptr;
  int num_heads = 0;
  int dim = 0;

  CacheRows keys;  // cols = dim
  int rows_per_page = 0;

  Mode mode = Mode::kPlain;
  int top_k = 0;
  int candidate_block = 0;
  int candidate_top = 0;

  TensorView selected;              // [num_rows, >= top_k], kI32
  int32_t* num_selected = nullptr;  // [num_rows]
  // Written by kProduce, read by kConsume, unused otherwise.
  TensorView candidates = {};         // [num_rows, >= candidate_top], kI32 block indices
  int32_t* num_candidates = nullptr;  // [num_rows]

  TensorView scores =
      {};  // [num_rows, max num_visible], kF32, -inf where masked; null data: not wanted
};

void IndexSelectCpu(const IndexSelectParams& params, const Launch& launch);
int64_t IndexSelectScratchBytesCpu(
    int top_k, int candidate_top, int num_heads, int dim, int num_threads);

}  // namespace twinspark
