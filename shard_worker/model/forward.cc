// The forward pass (forward.h). Section numbers are those of the model specification; "round" is
// the element type of the buffer a result goes to. Read from Run downwards.
#include "shard_worker/model/forward.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "common/string_view.h"

namespace twinspark {
namespace {

int64_t NowUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// The largest arena use of any op in a step of `bounds`.
int64_t ScratchBytes(const ModelConfig& c,
                     const ModelWeights& w,
                     const StepBounds& bounds,
                     int num_threads) {
  const auto linear = [&](const LinearWeights& weights, int64_t rows) {
    return weights.empty() ? 0
                           : static_cast<int64_t>(LinearScratchBytes(weights, rows, num_threads));
  };
  int64_t largest = 0;
  const auto add_block = [&](const BlockWeights& b) {
    int64_t inputs = linear(b.attn.wq_a, bounds.rows) + linear(b.attn.wkv, bounds.rows);
    if (b.compressor) {
      inputs += linear(b.compressor->wkv, bounds.rows) + linear(b.compressor->wgate, bounds.rows);
      largest = std::max(largest, linear(b.compressor->wk, bounds.rows));
    }
    int64_t queries = linear(b.attn.wq_b, bounds.rows);
    if (b.indexer) {
      inputs += linear(b.indexer->weights_proj, bounds.rows);
      queries += linear(b.indexer->wq_b, bounds.rows);
    }
    int64_t groups = 0;
    for (const LinearWeights& weights : b.attn.wo_a)
      groups += linear(weights, bounds.rows);
    int64_t outputs = 0;
    for (const LinearWeights& weights : b.attn.wo_b)
      outputs += linear(weights, bounds.rows);
    const int64_t inner = b.ffn.matrices.front().out_features();
    const int64_t chosen_rows = bounds.rows * (b.ffn.num_chosen + 1);
    int64_t experts = MoeScratchBytesCpu(bounds.rows, b.ffn.num_chosen, c.hidden_size, inner,
                                         static_cast<int>(b.ffn.experts.size()));
    for (const LinearWeights& weights : b.ffn.matrices)
      experts += linear(weights, std::min(bounds.rows, chosen_rows));
    largest = std::max(largest,
                       RouterScratchBytesCpu(bounds.rows, c.hidden_size,
                                             static_cast<int>(b.ffn.experts.size()), num_threads));
    if (b.engram) largest = std::max(largest, linear(b.engram->wkv, bounds.rows));
    largest = std::max({largest, inputs, queries, groups, outputs, experts});
  };
  for (const BlockWeights& block : w.blocks)
    add_block(block);
  if (w.draft) {
    for (const BlockWeights& stage : w.draft->stages)
      add_block(stage);
    largest = std::max({largest, linear(w.draft->main_proj, bounds.rows),
                        linear(w.draft->markov_head, bounds.draft_sequences),
                        linear(w.draft->confidence_proj, bounds.draft_sequences)});
  }
  largest = std::max(largest, linear(w.head, bounds.logits_rows));
  const int64_t keys = c.sliding_window + limits::kMaxRowsPerSequence + c.index_topk;
  largest = std::max({largest, AttentionScratchBytesCpu(keys, c.num_heads, c.head_dim, num_threads),
                      IndexSelectScratchBytesCpu(c.index_topk, std::max(1, c.candidate_topk_blocks),
                                                 c.index_num_heads, c.index_head_dim, num_threads),
                      ChooseTokensScratchBytesCpu(c.vocab_size, num_threads)});
  return largest + (int64_t{1} << 20);
}

}  // namespace

Forward::Forward(const ModelConfig& config,
                 const ModelWeights& weights,
                 const ModelOptions& options,
                 const StepBounds& bounds,
                 const OpTable& ops,
                 KvCache& cache,
                 ThreadPool& pool)
    : c_(config),
      w_(weights),
      options_(options),
      ops_(ops),
      cache_(cache),
      is_exact_(options.numerics == Numerics::kF32),
      ws_(config, options, bounds, cache.window_format()),
      tables_(config, bounds.rows),
      arena_(static_cast<size_t>(ScratchBytes(config, weights, bounds, pool.num_threads()))) {
  launch_.pool = &pool;
  launch_.arena = &arena_;
  // 3.0: one table for window-only layers and drafts, another (YaRN) for layers with a ratio.
  plain_frequencies_ = PlainRopeFrequencies(c_.rope_dim, static_cast<float>(c_.rope_theta));
  YarnParams yarn;
  yarn.rope_dim = c_.rope_dim;
  yarn.theta = static_cast<float>(c_.compress_rope_theta);
  yarn.factor = static_cast<float>(c_.yarn_factor);
  yarn.original_max_position = static_cast<float>(c_.yarn_original_max_position);
  yarn.beta_fast = static_cast<float>(c_.yarn_beta_fast);
  yarn.beta_slow = static_cast<float>(c_.yarn_beta_slow);
  compress_frequencies_ = YarnRopeFrequencies(yarn);
}

// ------------------------------------------------------------------------------------------------
// 3.1 Top level

absl::Status Forward::Run(std::span<Segment> segments,
                          RowClass row_class,
                          std::span<const Segment> next) {
  RETURN_IF_ERROR(Prepare(segments, row_class));
  HintRows(next, RowClass::kBulk);
  Embed(segments);
  for (int layer = 0; layer < c_.num_layers; ++layer) {
    const LayerTopology& topology = c_.layers[static_cast<size_t>(layer)];
    if (layer_hook_) RETURN_IF_ERROR(layer_hook_(layer));
    if (topology.engram_module >= 0) RETURN_IF_ERROR(EngramBlock(layer));
    if (topology.draft_tap >= 0 && w_.draft)  // tap[L] = round(mean over c of S[t, c, :])
      ops_.stream_mean(
          {.streams = ws_.streams.Rows(t_),
           .num_streams = c_.hc_mult,
           .out = ws_.taps.Rows(t_).Cols(topology.draft_tap * c_.hidden_size, c_.hidden_size)},
          launch_);
    RETURN_IF_ERROR(Block(layer));
  }
  RETURN_IF_ERROR(Head());
  DraftContext();
  return absl::OkStatus();
}

// The rows of `segments` with the ids before them. The ranges hold until the next call.
void Forward::FillRowRanges(std::span<const Segment> segments) {
  row_ranges_.clear();
  dead_.clear();
  size_t num_dead = 0;
  for (const Segment& s : segments)
    num_dead += static_cast<size_t>(s.num_rows()) + 3;
  dead_.reserve(num_dead);  // spans into it must stay
  for (const Segment& s : segments) {
    RowRange range;
    range.slot = s.slot;
    range.first_position = s.first_position;
    const int64_t history = std::min<int64_t>(3, s.first_position);
    range.history =
        std::span(s.sequence->ids)
            .subspan(static_cast<size_t>(s.first_position - history), static_cast<size_t>(history));
    range.ids = s.ids;
    if (!s.sequence->image_mask.empty()) {
      const size_t begin = dead_.size();
      for (int64_t p = s.first_position - history; p < s.first_position + s.num_rows(); ++p)
        dead_.push_back(s.sequence->IsImage(p) ? 1 : 0);
      range.dead = std::span(dead_).subspan(begin);
    }
    row_ranges_.push_back(range);
  }
}

void Forward::HintRows(std::span<const Segment> next, RowClass row_class) {
  if (next.empty() || rows_ == nullptr || c_.engram_layer_ids.empty()) return;
  FillRowRanges(next);
  rows_->Hint(row_ranges_, row_class);
}

absl::Status Forward::Prepare(std::span<Segment> segments, RowClass row_class) {
  tables_.Build(segments, cache_);
  t_ = tables_.num_rows;
  CHECK_LE(t_, ws_.streams.max_rows());
  CHECK_LE(tables_.num_logits_rows, ws_.logits.max_rows());

  // Rows of the Engram tables are asked for first: they are needed only after the first layer.
  if (!c_.engram_layer_ids.empty()) {
    FillRowRanges(segments);
    const int64_t start = NowUs();
    RETURN_IF_ERROR(rows_->Request(row_ranges_, row_class));
    engram_wait_us_ += NowUs() - start;
  }

  // 3.0 RoPE: cos and sin of every row, once per step.
  ops_.rope_table({.positions = tables_.positions.data(),
                   .frequencies = plain_frequencies_.data(),
                   .out = ws_.rope_plain.Rows(t_)},
                  launch_);
  ops_.rope_table({.positions = tables_.positions.data(),
                   .frequencies = compress_frequencies_.data(),
                   .out = ws_.rope_compress.Rows(t_)},
                  launch_);
  return absl::OkStatus();
}

void Forward::Embed(std::span<const Segment> segments) {
  EmbedIds();
  OverwriteEmbeddings(segments);
}

// S[t, c, :] = embed.weight[ids[t]] for all c; pre[t, :] = (1, 0, ..., 0).
void Forward::EmbedIds() {
  ops_.embed({.table = w_.embed.view(),
              .ids = tables_.ids.data(),
              .num_copies = c_.hc_mult,
              .out = ws_.streams.Rows(t_)},
             launch_);
  TensorView pre = ws_.pre.Rows(t_);
  for (int64_t t = 0; t < t_; ++t)
    for (int i = 0; i < c_.hc_mult; ++i)
      pre.Row<float>(t)[i] = i == 0 ? 1.0f : 0.0f;
}

// 3.14: rows of image spans come from outside.
void Forward::OverwriteEmbeddings(std::span<const Segment> segments) {
  const int64_t d = c_.hidden_size;
  for (const Segment& s : segments) {
    const SequenceState& sequence = *s.sequence;
    for (size_t i = 0; i < sequence.embedding_positions.size(); ++i) {
      const int64_t t = sequence.embedding_positions[i] - s.first_position;
      if (t < 0 || t >= s.num_rows()) continue;
      const ConstTensorView row =
          MakeView(sequence.embeddings.data() + i * static_cast<size_t>(d), 1, d);
      for (int stream = 0; stream < c_.hc_mult; ++stream)
        ops_.add({.a = row,
                  .b = {},
                  .out = ws_.streams.Rows(t_).Rows(s.row_begin + t, 1).Cols(stream * d, d)},
                 launch_);
    }
  }
}

Forward::Place Forward::BackbonePlace(int layer) {
  Place place;
  place.index = layer;
  place.weights = &w_.blocks[static_cast<size_t>(layer)];
  place.topology = &c_.layers[static_cast<size_t>(layer)];
  place.ring = cache_.window_ring(layer);
  // All vectors of one layer use that layer's table.
  place.rope = place.topology->ratio > 0 ? ws_.rope_compress.Rows(t_) : ws_.rope_plain.Rows(t_);
  return place;
}

absl::Status Forward::Block(int layer) {
  return RunBlock(BackbonePlace(layer));
}

// ------------------------------------------------------------------------------------------------
// 3.2 Block, with 3.3 (hyper-connections)

absl::Status Forward::RunBlock(const Place& place) {
  const BlockWeights& w = *place.weights;
  const TensorView streams = ws_.streams.Rows(t_);
  const TensorView pre_in = ws_.pre.Rows(t_);
  const TensorView attn_pre = ws_.attn_pre.Rows(t_);
  Show(place, "S_in", streams);
  Show(place, "pre_in", pre_in);

  // (a_pre, a_post, a_comb) = HCmix(S, hc_attn) from the streams ENTERING the sublayer;
  // x = RMSNorm(round(sum_c pre_in[c] * S[c]), attn_norm) with the CARRIED pre.
  const auto mix = [&](const HyperConnectionWeights& hc, TensorView pre, Buffer& post,
                       Buffer& comb) {
    ops_.hc_mix({.streams = streams,
                 .fn = hc.fn.view(),
                 .base = hc.base.view(),
                 .scale = hc.scale.view(),
                 .sinkhorn_iters = c_.hc_sinkhorn_iters,
                 .norm_eps = c_.rms_norm_eps,
                 .hc_eps = c_.hc_eps,
                 .pre = pre,
                 .post = post.Rows(t_),
                 .comb = comb.Rows(t_)},
                launch_);
  };
  const auto collapse = [&](TensorView pre, const FloatTensor& norm) {
    ops_.collapse_norm({.streams = streams,
                        .pre = pre,
                        .weight = norm.view(),
                        .eps = c_.rms_norm_eps,
                        .out = ws_.x.Rows(t_),
                        .collapsed = {}},
                       launch_);
  };
  // S'[j] = round(post[j] * y + sum_i comb[i][j] * S[i])
  const auto spread = [&](Buffer& post, Buffer& comb) {
    ops_.hc_post({.y = ws_.y.Rows(t_),
                  .streams = streams,
                  .post = post.Rows(t_),
                  .comb = comb.Rows(t_),
                  .out = streams},
                 launch_);
  };

  mix(w.hc_attn, attn_pre, ws_.attn_post, ws_.attn_comb);
  collapse(pre_in, w.attn_norm);
  trace_.Add(ws_.x.Rows(t_));
  Show(place, "attn.pre", attn_pre);
  Show(place, "attn.post", ws_.attn_post.Rows(t_));
  Show(place, "attn.comb", ws_.attn_comb.Rows(t_));
  Show(place, "attn.x", ws_.x.Rows(t_));
  RETURN_IF_ERROR(Attention(place));
  Show(place, "attn.y", ws_.y.Rows(t_));
  spread(ws_.attn_post, ws_.attn_comb);
  Show(place, "S_mid", streams);

  // The FFN is fed by the attention's pre; its own pre feeds the next block's attention.
  mix(w.hc_ffn, pre_in, ws_.ffn_post, ws_.ffn_comb);
  collapse(attn_pre, w.ffn_norm);
  trace_.Add(ws_.x.Rows(t_));
  Show(place, "ffn.pre", pre_in);
  Show(place, "ffn.post", ws_.ffn_post.Rows(t_));
  Show(place, "ffn.comb", ws_.ffn_comb.Rows(t_));
  Show(place, "ffn.x", ws_.x.Rows(t_));
  RETURN_IF_ERROR(Experts(place));
  Show(place, "ffn.y", ws_.y.Rows(t_));
  spread(ws_.ffn_post, ws_.ffn_comb);
  Show(place, "S_out", streams);
  return absl::OkStatus();
}

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

// 5.3: the ranks' partial sums (or the two halves that a single rank computes) are added in f32,
// lower one first, and rounded once.
absl::Status Forward::SumPartials(TensorView out, bool over_ranks) {
  TensorView sum = ws_.partial[0].Rows(t_);
  if (options_.world > 1 && over_ranks) {
    const int64_t start = NowUs();
    RETURN_IF_ERROR(Timed(communicator_->AllReduceSum(std::span(
                              sum.Row<float>(0), static_cast<size_t>(sum.rows * sum.cols))),
                          start));
  }
  AddParams add{.a = sum, .b = {}, .out = out};
  if (w_.num_partials > 1) add.b = ws_.partial[1].Rows(t_);
  ops_.add(add, launch_);
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------------------------
// 3.10 MoE

absl::Status Forward::Experts(const Place& place) {
  const MoeWeights& w = place.weights->ffn;
  const TensorView x = ws_.x.Rows(t_);
  const int64_t num_experts = static_cast<int64_t>(w.experts.size());
  TensorView ids = ws_.route_ids.Rows(t_).Cols(0, w.num_chosen);
  TensorView weights = ws_.route_weights.Rows(t_).Cols(0, w.num_chosen);
  RouterParams router;
  router.x = x;
  router.gate = w.gate.view();
  router.bias = w.bias.values.data();
  // bias_vl inside image spans; the draft stages always use the text bias.
  if (tables_.has_images && place.kind == 'L' && !w.bias_vl.empty()) {
    router.image_bias = w.bias_vl.values.data();
    router.image_mask = tables_.image_mask.data();
  }
  router.num_chosen = w.num_chosen;
  router.scaling_factor = c_.routed_scaling_factor;
  router.ids = ids;
  router.weights = weights;
  if (Observed()) {
    observed_.resize(static_cast<size_t>(t_ * num_experts));
    router.scores = MakeView(observed_.data(), t_, num_experts);
  }
  ops_.router(router, launch_);
  trace_.Add(ids);
  trace_.Add(weights);
  if (Observed()) Show(place, "route.s", router.scores);
  Show(place, "route.ids", ids);
  Show(place, "route.w", weights);

  MoeParams moe;
  moe.x = x;
  moe.ids = ids;
  moe.weights = weights;
  moe.experts = w.experts.data();
  moe.num_experts = static_cast<int>(num_experts);
  moe.shared = &w.shared;
  const bool is_whole = options_.reference.whole_experts;
  moe.inner = c_.moe_intermediate_size / (is_whole ? 1 : options_.world);
  moe.limit = c_.swiglu_limit;
  moe.gate_up_dtype = is_exact_ ? DType::kF32 : DType::kBf16;
  moe.activation_dtype = moe.gate_up_dtype;
  moe.num_partials = w_.num_partials;
  for (int p = 0; p < w_.num_partials; ++p)
    moe.out[p] = ws_.partial[p].Rows(t_);
  ops_.moe(moe, launch_);
  return SumPartials(ws_.y.Rows(t_), !is_whole);
}

// ------------------------------------------------------------------------------------------------
// 3.11 Engram block

absl::Status Forward::EngramBlock(int layer) {
  const EngramWeights& w = *w_.blocks[static_cast<size_t>(layer)].engram;
  ConstTensorView codes;
  ConstTensorView scales;
  RETURN_IF_ERROR(
      GatherEngramRows(c_.layers[static_cast<size_t>(layer)].engram_module, codes, scales));
  // e = concat over the columns of round(e4m3 * 2^(scale - 127)); kv = wkv e
  const TensorView values = ws_.row_values.Rows(t_);
  const TensorView kv = ws_.engram_kv.Rows(t_);
  ops_.engram_dequantize({.codes = codes, .scales = scales, .out = values}, launch_);
  Linear(w.wkv, values, kv);
  const TensorView streams = ws_.streams.Rows(t_);
  EngramGateParams gate;
  gate.streams = streams;
  gate.kv = kv;
  gate.weight = w.gate.view();
  gate.eps = c_.rms_norm_eps;
  if (tables_.has_images) gate.image_mask = tables_.image_mask.data();
  gate.out = streams;
  if (Observed()) {
    observed_.resize(static_cast<size_t>(t_ * c_.hc_mult));
    gate.gate = MakeView(observed_.data(), t_, c_.hc_mult);
  }
  ops_.engram_gate(gate, launch_);
  if (!Observed()) return absl::OkStatus();
  observer_->Tensor(absl::StrCat("L", layer, ".engram.gate"), gate.gate);
  observer_->Tensor(absl::StrCat("L", layer, ".engram.S"), streams);
  return absl::OkStatus();
}

// Every rank reads its own columns: its share of the heads of every n-gram order. The raw rows are
// gathered and put back in column order = order * heads + head.
absl::Status Forward::GatherEngramRows(int module_idx,
                                       ConstTensorView& codes,
                                       ConstTensorView& scales) {
  const int64_t start = NowUs();
  const absl::StatusOr<EngramRows> own = rows_->Rows(module_idx);
  engram_wait_us_ += NowUs() - start;
  if (!own.ok()) return own.status();
  const int64_t columns = c_.engram_num_columns();
  const int64_t code_bytes = c_.engram_head_dim;
  const int64_t scale_bytes = c_.engram_head_dim / 32;
  const auto view = [&](const void* data, DType dtype, int64_t width) {
    return ConstTensorView(
        BasicTensorView<const void*>{data, dtype, t_, columns * width, columns * width});
  };
  if (options_.world == 1) {
    codes = view(own->values, DType::kF8E4M3, code_bytes);
    scales = view(own->scales, DType::kF8E8M0, scale_bytes);
    return absl::OkStatus();
  }
  const int64_t world = options_.world;
  const int64_t own_columns = columns / world;
  const int64_t own_heads = c_.engram_num_heads / world;
  const auto gather = [&](const uint8_t* mine, int64_t width, Buffer& to) -> absl::Status {
    const int64_t part = t_ * own_columns * width;
    gathered_rows_.resize(static_cast<size_t>(part * world));
    const int64_t gather_start = NowUs();
    RETURN_IF_ERROR(
        Timed(communicator_->AllGather(std::as_bytes(std::span(mine, static_cast<size_t>(part))),
                                       std::span(gathered_rows_)),
              gather_start));
    const std::byte* from = gathered_rows_.data();
    std::byte* out = to.data<std::byte>();
    for (int64_t rank = 0; rank < world; ++rank)
      for (int64_t t = 0; t < t_; ++t)
        for (int64_t order = 0; order < c_.engram_num_orders(); ++order) {
          const int64_t column = order * c_.engram_num_heads + rank * own_heads;
          const int64_t bytes = own_heads * width;
          std::memcpy(out + (t * columns + column) * width, from, static_cast<size_t>(bytes));
          from += bytes;
        }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(gather(own->values, code_bytes, ws_.row_codes));
  RETURN_IF_ERROR(gather(own->scales, scale_bytes, ws_.row_scales));
  codes = view(ws_.row_codes.data<std::byte>(), DType::kF8E4M3, code_bytes);
  scales = view(ws_.row_scales.data<std::byte>(), DType::kF8E8M0, scale_bytes);
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------------------------
// 3.12 Final head, for the rows that want logits

absl::Status Forward::Head() {
  if (Observed() && w_.draft) observer_->Tensor("taps", ws_.taps.Rows(t_));
  if (tables_.num_logits_rows == 0) return absl::OkStatus();
  int64_t done = 0;
  for (const auto& [first, count] : tables_.logits_ranges) {
    FinalNorm(first, count, done);
    done += count;
  }
  trace_.Add(ws_.final_x.Rows(done));
  RETURN_IF_ERROR(Logits(done));
  if (!Observed()) return absl::OkStatus();
  observer_->Tensor("final.h", ws_.final_h.Rows(done));
  observer_->Tensor("final.x", ws_.final_x.Rows(done));
  observer_->Tensor("logits", ws_.logits.Rows(done));
  return absl::OkStatus();
}

// h = round(sum_c pre[c] * S[c]) with the LAST block's FFN pre; x = RMSNorm(h, norm)
void Forward::FinalNorm(int64_t first, int64_t count, int64_t to) {
  ops_.collapse_norm({.streams = ws_.streams.Rows(t_).Rows(first, count),
                      .pre = ws_.pre.Rows(t_).Rows(first, count),
                      .weight = w_.norm.view(),
                      .eps = c_.rms_norm_eps,
                      .out = ws_.final_x.All().Rows(to, count),
                      .collapsed = ws_.final_h.All().Rows(to, count)},
                     launch_);
}

absl::StatusOr<ConstTensorView> Forward::LogitsOfRows(int64_t first, int64_t count) {
  CHECK(first >= 0 && first + count <= t_ && count <= ws_.logits.max_rows())
      << first << " + " << count << " of " << t_;
  FinalNorm(first, count, 0);
  trace_.Add(ws_.final_x.Rows(count));
  RETURN_IF_ERROR(Logits(count));
  return ConstTensorView(ws_.logits.Rows(count));
}

// logits = head . x in f32. Every rank computes its slice of the vocabulary, then all have all.
absl::Status Forward::Logits(int64_t num_rows) {
  if (options_.world == 1) {
    Linear(w_.head, ws_.final_x.Rows(num_rows), ws_.logits.Rows(num_rows));
    return absl::OkStatus();
  }
  const TensorView slice = ws_.logits_slice.Rows(num_rows);
  const TensorView slices = ws_.logits_slices.Rows(num_rows * options_.world);
  Linear(w_.head, ws_.final_x.Rows(num_rows), slice);
  const auto bytes = [](const TensorView& view) {
    return std::span(static_cast<std::byte*>(view.data),
                     static_cast<size_t>(view.rows * view.cols) * sizeof(float));
  };
  const int64_t start = NowUs();
  RETURN_IF_ERROR(Timed(communicator_->AllGather(bytes(slice), bytes(slices)), start));
  ops_.join_slices({.parts = slices, .num_ranks = options_.world, .out = ws_.logits.Rows(num_rows)},
                   launch_);
  return absl::OkStatus();
}

// ------------------------------------------------------------------------------------------------
// Small helpers

ConstTensorView Forward::streams() {
  return ws_.streams.Rows(tables_.num_rows);
}

ConstTensorView Forward::logits() {
  return ws_.logits.Rows(tables_.num_logits_rows);
}

void Forward::Linear(const LinearWeights& weights, ConstTensorView x, TensorView y) {
  ops_.linear({.weights = &weights, .x = x, .y = y}, launch_);
}

void Forward::Linears(std::span<const LinearParams> jobs) {
  ops_.linear_batch({.jobs = jobs}, launch_);
}

void Forward::Norm(const FloatTensor& weight, TensorView x) {
  ops_.rms_norm({.x = x, .weight = weight.view(), .eps = c_.rms_norm_eps, .out = x}, launch_);
}

void Forward::Rope(TensorView x, int head_dim, ConstTensorView table, bool inverse) {
  ops_.rope({.x = x,
             .head_dim = head_dim,
             .rope_dim = c_.rope_dim,
             .table = table,
             .inverse = inverse,
             .out = x},
            launch_);
}

CacheRows Forward::StepRows() {
  return {ws_.step_rows.data<std::byte>(), cache_.window_format(), t_, c_.head_dim};
}

void Forward::Show(const Place& place, std::string_view name, const ConstTensorView& value) {
  if (!Observed()) return;
  const char kind[] = {place.kind, '\0'};
  observer_->Tensor(absl::StrCat(kind, place.index, ".", ToAbsl(name)), value);
}

void Forward::ShowCacheRows(const Place& place,
                            std::string_view name,
                            const CacheRows& rows,
                            const int64_t* index,
                            int64_t count) {
  observed_.resize(static_cast<size_t>(count * rows.cols));
  const TensorView out = MakeView(observed_.data(), count, rows.cols);
  ops_.load_rows({.src = rows, .index = index, .out = out}, launch_);
  Show(place, name, out);
}

absl::Status Forward::Timed(absl::Status status, int64_t start_us) {
  collectives_us_ += NowUs() - start_us;
  return status;
}

}  // namespace twinspark
