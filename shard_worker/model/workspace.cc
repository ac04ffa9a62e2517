// Shapes of the activation buffers (workspace.h).
#include "shard_worker/model/workspace.h"

#include <algorithm>

namespace twinspark {

Workspace::Workspace(const ModelConfig& c,
                     const ModelOptions& options,
                     const StepBounds& bounds,
                     CacheFormat window_format) {
  const DType a = options.numerics == Numerics::kF32 ? DType::kF32 : DType::kBf16;
  constexpr DType kF = DType::kF32;
  constexpr DType kI = DType::kI32;
  constexpr DType kByte = DType::kI8;
  const int64_t t = bounds.rows;
  const int64_t d = c.hidden_size;
  const int64_t streams_n = c.hc_mult;
  const int64_t heads = c.num_heads / options.world;
  const int64_t groups = c.o_groups / options.world;

  streams = Buffer(a, t, streams_n * d);
  pre = Buffer(kF, t, streams_n);
  attn_pre = Buffer(kF, t, streams_n);
  attn_post = Buffer(kF, t, streams_n);
  attn_comb = Buffer(kF, t, streams_n * streams_n);
  ffn_post = Buffer(kF, t, streams_n);
  ffn_comb = Buffer(kF, t, streams_n * streams_n);
  x = Buffer(a, t, d);
  y = Buffer(a, t, d);
  for (Buffer& buffer : partial)
    buffer = Buffer(kF, t, d);

  qr = Buffer(a, t, c.q_lora_rank);
  q = Buffer(a, t, heads * c.head_dim);
  o = Buffer(a, t, heads * c.head_dim);
  window = Buffer(a, t, c.head_dim);
  step_rows = Buffer(kByte, t, CacheRowBytes(window_format, c.head_dim));
  z = Buffer(a, t, groups * c.o_lora_rank);

  kv_score = Buffer(kF, t, 2 * static_cast<int64_t>(c.head_dim));
  latent = Buffer(a, t, c.head_dim);
  roped_latent = Buffer(a, t, c.head_dim);
  key = Buffer(a, t, c.index_head_dim);
  index_q = Buffer(a, t, static_cast<int64_t>(c.index_num_heads) * c.index_head_dim);
  index_weights = Buffer(a, t, c.index_num_heads);
  selected = Buffer(kI, t, c.index_topk);
  num_selected = Buffer(kI, t, 1);
  candidates = Buffer(kI, t, std::max(1, c.candidate_topk_blocks));
  num_candidates = Buffer(kI, t, 1);
  rope_plain = Buffer(kF, t, c.rope_dim);
  rope_compress = Buffer(kF, t, c.rope_dim);
  rope_groups = Buffer(kF, t, c.rope_dim);

  const int chosen = std::max(c.experts_per_token, c.draft_experts_per_token);
  route_ids = Buffer(kI, t, chosen);
  route_weights = Buffer(kF, t, chosen);

  const int64_t row_width = static_cast<int64_t>(c.engram_num_columns()) * c.engram_head_dim;
  row_codes = Buffer(kByte, t, row_width);
  row_scales = Buffer(kByte, t, row_width / 32);
  row_values = Buffer(a, t, row_width);
  engram_kv = Buffer(a, t, (streams_n + 1) * d);

  AllocateHeads(c, options, bounds, a);
}

// The target's head and the draft head.
void Workspace::AllocateHeads(const ModelConfig& c,
                              const ModelOptions& options,
                              const StepBounds& bounds,
                              DType a) {
  constexpr DType kF = DType::kF32;
  const int64_t t = bounds.rows;
  const int64_t d = c.hidden_size;
  const int64_t vocab_slice = c.vocab_size / options.world;
  final_h = Buffer(a, bounds.logits_rows, d);
  final_x = Buffer(a, bounds.logits_rows, d);
  if (options.world > 1) {
    logits_slice = Buffer(kF, bounds.logits_rows, vocab_slice);
    logits_slices = Buffer(kF, options.world * bounds.logits_rows, vocab_slice);
  }
  logits = Buffer(kF, bounds.logits_rows, c.vocab_size);

  taps = Buffer(a, t, static_cast<int64_t>(c.draft_target_layer_ids.size()) * d);
  main_x = Buffer(a, t, d);
  const int64_t sequences = bounds.draft_sequences;
  draft_logits = Buffer(kF, sequences, c.vocab_size);
  confidence_in = Buffer(a, sequences, d + c.draft_markov_rank);
  confidence = Buffer(kF, sequences, 1);
}

int64_t Workspace::bytes() const {
  const Buffer* all[] = {&streams,
                         &pre,
                         &attn_pre,
                         &attn_post,
                         &attn_comb,
                         &ffn_post,
                         &ffn_comb,
                         &x,
                         &y,
                         &partial[0],
                         &partial[1],
                         &qr,
                         &q,
                         &o,
                         &window,
                         &step_rows,
                         &z,
                         &kv_score,
                         &latent,
                         &roped_latent,
                         &key,
                         &index_q,
                         &index_weights,
                         &selected,
                         &num_selected,
                         &candidates,
                         &num_candidates,
                         &rope_plain,
                         &rope_compress,
                         &rope_groups,
                         &route_ids,
                         &route_weights,
                         &row_codes,
                         &row_scales,
                         &row_values,
                         &engram_kv,
                         &final_h,
                         &final_x,
                         &logits_slice,
                         &logits_slices,
                         &logits,
                         &taps,
                         &main_x,
                         &draft_logits,
                         &confidence_in,
                         &confidence};
  int64_t sum = 0;
  for (const Buffer* buffer : all)
    sum += buffer->bytes();
  return sum;
}

}  // namespace twinspark
