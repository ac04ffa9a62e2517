// Attention of a block: model specification 3.4 to 3.9, in its order. Members of Forward
// (forward.h), called by RunBlock (forward.cc) for backbone layers and draft stages alike.
#include <algorithm>
#include <array>
#include <cmath>
#include <vector>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "shard_worker/model/forward.h"

namespace twinspark {

// ------------------------------------------------------------------------------------------------
// 3.4 Attention: projections

absl::Status Forward::Attention(const Place& place) {
  const BlockWeights& w = *place.weights;
  const ConstTensorView x = ws_.x.Rows(t_);
  const TensorView qr = ws_.qr.Rows(t_);
  const TensorView q = ws_.q.Rows(t_);
  const TensorView window = ws_.window.Rows(t_);
  const bool compresses = w.compressor.has_value();
  const bool pools = compresses && place.topology->ratio > 1;

  // Everything that reads x, in one pass: wq_a x, wkv x, the compressor's projections (3.5; f32
  // when they are pooled), the index weights (3.6).
  std::array<LinearParams, 5> jobs;
  size_t num_jobs = 0;
  const auto job = [&](const LinearWeights& weights, ConstTensorView in, TensorView out) {
    jobs[num_jobs++] = {.weights = &weights, .x = in, .y = out};
  };
  job(w.attn.wq_a, x, qr);
  job(w.attn.wkv, x, window);
  if (pools) {
    const TensorView kv_score = ws_.kv_score.Rows(t_);
    job(w.compressor->wkv, x, kv_score.Cols(0, c_.head_dim));
    job(w.compressor->wgate, x, kv_score.Cols(c_.head_dim, c_.head_dim));
  } else if (compresses) {
    job(w.compressor->wkv, x, ws_.latent.Rows(t_));
  }
  if (w.indexer) job(w.indexer->weights_proj, x, ws_.index_weights.Rows(t_));
  Linears(std::span(jobs).first(num_jobs));

  Norm(w.attn.q_norm, qr);  // qr = RMSNorm(wq_a x, q_norm)
  trace_.Add(qr);
  Show(place, "qr", qr);
  num_jobs = 0;
  job(w.attn.wq_b, qr, q);
  if (w.indexer) job(w.indexer->wq_b, qr, ws_.index_q.Rows(t_));
  Linears(std::span(jobs).first(num_jobs));

  Rope(q, c_.head_dim, place.rope, false);  // q = rope_p(wq_b qr), no per-head norm
  Show(place, "q", q);

  // w = Q8(rope_p(RMSNorm(wkv x, kv_norm)))
  Norm(w.attn.kv_norm, window);
  Rope(window, c_.head_dim, place.rope, false);
  ops_.store_rows({.x = window, .dst = StepRows()}, launch_);
  if (Observed()) ShowCacheRows(place, "win", StepRows(), nullptr, t_);

  if (place.topology != nullptr && place.topology->ratio > 0) {
    if (compresses) Compress(place);
    if (w.indexer) SelectRows(place);
  }
  SparseAttend(place);
  // The ring keeps the window row at its position. After the attention: the ring is only a little
  // longer than the window, a chunk may be longer than the ring.
  if (place.keep_rows)
    ops_.copy_rows({.src = StepRows(),
                    .dst = place.ring,
                    .num_rows = t_,
                    .dst_index = tables_.ring_row.data()},
                   launch_);
  return OutputProjection(place);
}

// ------------------------------------------------------------------------------------------------
// 3.5 Compressor and index keys

void Forward::Compress(const Place& place) {
  const CompressorWeights& w = *place.weights->compressor;
  const LayerTopology& topology = *place.topology;
  const GroupTable& groups = tables_.groups[topology.ratio];
  const CacheRows& carry = cache_.carry(topology.source_idx);
  const TensorView latent = ws_.latent.Rows(groups.num_groups);
  if (topology.ratio > 1) {
    // u[j] = sum_i softmax_i(sc[r*g + i][j]) * kv[r*g + i][j], rounded before its norm. Tokens of
    // earlier steps come from the carry ring, which then receives this step's.
    ops_.compress_pool({.kv_score = ws_.kv_score.Rows(t_),
                        .carry = carry,
                        .ratio = topology.ratio,
                        .sources = groups.sources.data(),
                        .out = latent},
                       launch_);
    ops_.store_rows({.x = ws_.kv_score.Rows(t_), .dst = carry, .index = tables_.carry_row.data()},
                    launch_);
  }
  if (groups.num_groups == 0) return;
  Norm(w.norm, latent);  // latent_g, not rotated
  Show(place, "latent", latent);

  // Rows and keys are rotated at the group's FIRST token.
  const TensorView rope = ws_.rope_groups.Rows(groups.num_groups);
  ops_.rope_table({.positions = groups.positions.data(),
                   .frequencies = compress_frequencies_.data(),
                   .out = rope},
                  launch_);
  // key_g = Q4e8(rope(RMSNorm(wk latent_g, k_norm))), from the UNROTATED latent
  const TensorView key = ws_.key.Rows(groups.num_groups);
  const CacheRows& keys = cache_.keys(topology.source_idx);
  Linear(w.wk, latent, key);
  Norm(w.k_norm, key);
  Rope(key, c_.index_head_dim, rope, false);
  ops_.store_rows({.x = key, .dst = keys, .index = groups.store_row.data()}, launch_);
  if (Observed()) ShowCacheRows(place, "key", keys, groups.store_row.data(), groups.num_groups);
  // row_g = Q4e4(rope(latent_g))
  const CacheRows& rows = cache_.rows(topology.source_idx);
  Rope(latent, c_.head_dim, rope, false);
  ops_.store_rows({.x = latent, .dst = rows, .index = groups.store_row.data()}, launch_);
  if (Observed()) ShowCacheRows(place, "row", rows, groups.store_row.data(), groups.num_groups);
}

// ------------------------------------------------------------------------------------------------
// 3.6 Indexer: which compressed rows the layers up to the next indexer attend to

void Forward::SelectRows(const Place& place) {
  const LayerTopology& topology = *place.topology;
  const TensorView index_q = ws_.index_q.Rows(t_);
  // iq = Q4e8(rope_p(indexer.wq_b qr))
  Rope(index_q, c_.index_head_dim, place.rope, false);
  ops_.quantize_values({.x = index_q, .format = cache_.key_format(), .out = index_q}, launch_);
  Show(place, "iq", index_q);

  IndexSelectParams select;
  select.q = index_q;
  select.weights = ws_.index_weights.Rows(t_);
  // iw = (weights_proj x) * index_head_dim^-0.5 * index_heads^-0.5
  select.weight_scale =
      static_cast<float>(std::pow(c_.index_head_dim, -0.5) * std::pow(c_.index_num_heads, -0.5));
  select.rows = tables_.index[topology.ratio].data();
  select.num_heads = c_.index_num_heads;
  select.dim = c_.index_head_dim;
  select.keys = cache_.keys(topology.source_idx);  // of the layer's own KV source
  select.rows_per_page = KvCache::RowsPerPage(topology.ratio);
  select.mode = topology.makes_candidates  ? IndexSelectParams::Mode::kProduce
                : topology.uses_candidates ? IndexSelectParams::Mode::kConsume
                                           : IndexSelectParams::Mode::kPlain;
  select.top_k = c_.index_topk;
  select.candidate_block = c_.candidate_block_size;
  select.candidate_top = c_.candidate_topk_blocks;
  select.selected = ws_.selected.Rows(t_);
  select.num_selected = ws_.num_selected.data<int32_t>();
  select.candidates = ws_.candidates.Rows(t_);
  select.num_candidates = ws_.num_candidates.data<int32_t>();
  std::vector<float> scores;
  if (Observed()) {
    observed_.resize(static_cast<size_t>(t_ * c_.index_num_heads));
    const TensorView weights = MakeView(observed_.data(), t_, c_.index_num_heads);
    ops_.add({.a = select.weights, .b = {}, .out = weights}, launch_);
    for (float& weight : observed_)
      weight *= select.weight_scale;
    Show(place, "iw", weights);
    int64_t visible = 0;
    for (int64_t t = 0; t < t_; ++t)
      visible = std::max(visible, select.rows[t].num_visible);
    if (observer_->WantsScores()) {
      scores.assign(static_cast<size_t>(t_ * std::max<int64_t>(1, visible)), -INFINITY);
      if (visible > 0) select.scores = MakeView(scores.data(), t_, visible);
    }
  }
  ops_.index_select(select, launch_);
  trace_.AddSelection(select, cache_.rows(topology.source_idx), t_);
  if (!Observed()) return;
  if (!scores.empty())
    Show(place, "score", MakeView(scores.data(), t_, static_cast<int64_t>(scores.size()) / t_));
  observer_->Lists(absl::StrCat("L", place.index, ".sel"), select.selected, select.num_selected);
  if (topology.makes_candidates)
    observer_->Lists(absl::StrCat("L", place.index, ".cand"), select.candidates,
                     select.num_candidates);
}

// ------------------------------------------------------------------------------------------------
// 3.7 Attention core, 3.8: rows of the KV source, selection of the latest index source

void Forward::SparseAttend(const Place& place) {
  const AttentionWeights& w = place.weights->attn;
  const int heads = c_.num_heads / options_.world;
  const TensorView o = ws_.o.Rows(t_);
  AttentionParams attend;
  attend.q = ws_.q.Rows(t_);
  attend.rows = tables_.attention.data();
  attend.sink = w.sink.values.data();
  attend.num_heads = heads;
  attend.head_dim = c_.head_dim;
  attend.scale = static_cast<float>(std::pow(c_.head_dim, -0.5));
  attend.round_probabilities = !is_exact_;
  attend.ring = place.ring;
  attend.ring_slots = cache_.ring_slots();
  attend.step_rows = StepRows();
  if (place.topology != nullptr && place.topology->ratio > 0) {
    attend.compressed = cache_.rows(place.topology->source_idx);
    attend.rows_per_page = KvCache::RowsPerPage(place.topology->ratio);
    attend.selected = ws_.selected.Rows(t_);
    attend.num_selected = ws_.num_selected.data<int32_t>();
  }
  attend.out = o;
  trace_.AddWindow(attend, t_);
  ops_.attention(attend, launch_);
  Rope(o, c_.head_dim, place.rope, true);  // the inverse, at the query's own position
  Show(place, "o", o);
}

// ------------------------------------------------------------------------------------------------
// 3.9 Output projection: z[g] = wo_a_g . o[heads of group g], y = wo_b . z

absl::Status Forward::OutputProjection(const Place& place) {
  const AttentionWeights& w = place.weights->attn;
  const int64_t num_groups = static_cast<int64_t>(w.wo_a.size());
  const TensorView o = ws_.o.Rows(t_);
  const TensorView z = ws_.z.Rows(t_);
  std::vector<LinearParams> jobs;
  const int64_t width = o.cols / num_groups;
  for (int64_t g = 0; g < num_groups; ++g)
    jobs.push_back({.weights = &w.wo_a[static_cast<size_t>(g)],
                    .x = o.Cols(g * width, width),
                    .y = z.Cols(g * c_.o_lora_rank, c_.o_lora_rank)});
  Linears(jobs);
  jobs.clear();
  const int64_t part = z.cols / w_.num_partials;
  for (int p = 0; p < w_.num_partials; ++p)
    jobs.push_back({.weights = &w.wo_b[static_cast<size_t>(p)],
                    .x = z.Cols(p * part, part),
                    .y = ws_.partial[p].Rows(t_)});
  Linears(jobs);
  return SumPartials(ws_.y.Rows(t_), true);
}

}  // namespace twinspark
