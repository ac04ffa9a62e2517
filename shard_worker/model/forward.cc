// The forward pass (forward.h): embedding, the frame of a block, experts, head; attention_layer.cc
// and engram_layer.cc are the rest of a layer. Section numbers are those of the model
// specification; "round" is the element type of the buffer a result goes to. Read from Run
// downwards.
#include "shard_worker/model/forward.h"

#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "common/string_view.h"

namespace twinspark {
namespace {

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

int64_t Forward::NowUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

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
