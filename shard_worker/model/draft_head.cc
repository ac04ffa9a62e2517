// DSpark: model specification 3.13 and dspark specification 1.2 to 1.6. Context rows of every row
// of a step, then one draft pass: the draft blocks are ordinary blocks (forward.cc) whose keys are
// the last committed context rows and the rows of the draft block itself.
#include <algorithm>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "shard_worker/model/forward.h"

namespace twinspark {

Forward::Place Forward::DraftPlace(int stage) {
  Place place;
  place.kind = 'M';
  place.index = stage;
  place.weights = &w_.draft->stages[static_cast<size_t>(stage)];
  place.ring = cache_.draft_ring(stage);
  place.rope = ws_.rope_plain.Rows(t_);
  place.keep_rows = false;
  return place;
}

// main_x[p] = RMSNorm(main_proj . concat(taps[p]), main_norm)
// context row of stage i at p = Q8(rope_p(RMSNorm(wkv_i main_x[p], kv_norm_i)))
// Written for every row, also without drafting: a rejected row is behind the committed length and
// never visible, and drafting may resume at any time.
void Forward::DraftContext() {
  if (!w_.draft) return;
  // Rows of a long chunk that no draft can see any more are skipped.
  const std::vector<int64_t>& draft_row = tables_.draft_row;
  int64_t begin = 0;
  while (begin < t_ && draft_row[static_cast<size_t>(begin)] < 0)
    ++begin;
  const int64_t count = t_ - begin;
  if (count == 0) return;
  const TensorView main_x = ws_.main_x.Rows(count);
  Linear(w_.draft->main_proj, ws_.taps.Rows(t_).Rows(begin, count), main_x);
  Norm(w_.draft->main_norm, main_x);
  if (Observed()) {
    observer_->Tensor("dspark.main_hidden", ws_.taps.Rows(t_).Rows(begin, count));
    observer_->Tensor("dspark.main_x", main_x);
  }
  for (int stage = 0; stage < c_.num_draft_stages; ++stage) {
    const AttentionWeights& w = w_.draft->stages[static_cast<size_t>(stage)].attn;
    const TensorView row = ws_.window.Rows(count);
    Linear(w.wkv, main_x, row);
    Norm(w.kv_norm, row);
    Rope(row, c_.head_dim, ws_.rope_plain.Rows(t_).Rows(begin, count), false);
    ops_.store_rows({.x = row, .dst = cache_.draft_ring(stage), .index = draft_row.data() + begin},
                    launch_);
  }
}

absl::Status Forward::Draft(std::span<const DraftRequest> requests,
                            std::span<int32_t> drafts,
                            std::span<float> confidences) {
  CHECK(w_.draft.has_value());
  const size_t block = static_cast<size_t>(c_.draft_block_size);
  CHECK_EQ(drafts.size(), requests.size() * block);
  // ids = [anchor, noise, noise, ...] at positions P .. P + block - 1
  std::vector<int32_t> ids(requests.size() * block, c_.draft_noise_token_id);
  std::vector<Segment> segments;
  for (size_t i = 0; i < requests.size(); ++i) {
    ids[i * block] = requests[i].anchor;
    Segment segment;
    segment.slot = requests[i].slot;
    segment.sequence = requests[i].sequence;
    segment.first_position = requests[i].position;
    segment.ids = std::span(ids).subspan(i * block, block);
    segments.push_back(segment);
  }
  tables_.BuildDraft(segments, cache_);
  t_ = tables_.num_rows;
  CHECK_LE(t_, ws_.streams.max_rows());
  ops_.rope_table({.positions = tables_.positions.data(),
                   .frequencies = plain_frequencies_.data(),
                   .out = ws_.rope_plain.Rows(t_)},
                  launch_);
  EmbedIds();
  for (int stage = 0; stage < c_.num_draft_stages; ++stage)
    RETURN_IF_ERROR(RunBlock(DraftPlace(stage)));

  // h = round(sum_c pre[c] * S[c]); U = head . RMSNorm(h, mtp.last.norm), the target's head
  ops_.collapse_norm({.streams = ws_.streams.Rows(t_),
                      .pre = ws_.pre.Rows(t_),
                      .weight = w_.draft->norm.view(),
                      .eps = c_.rms_norm_eps,
                      .out = ws_.final_x.Rows(t_),
                      .collapsed = ws_.final_h.Rows(t_)},
                     launch_);
  RETURN_IF_ERROR(Logits(t_));
  if (Observed()) {
    observer_->Tensor("dspark.h", ws_.final_h.Rows(t_));
    observer_->Tensor("dspark.base_logits", ws_.logits.Rows(t_));
  }
  MarkovChain(requests, drafts, confidences);
  return absl::OkStatus();
}

// prev = anchor; for k: e = markov_embed[prev]; l = U[k] + markov_head . e; tok[k] = pick(l);
// conf[k] = confidence_proj . concat(h[k], e); prev = tok[k]. All sequences side by side. The same
// keyed noise as the target's draw at that position (dspark specification 2.3).
void Forward::MarkovChain(std::span<const DraftRequest> requests,
                          std::span<int32_t> drafts,
                          std::span<float> confidences) {
  const DraftWeights& w = *w_.draft;
  const int64_t num = static_cast<int64_t>(requests.size());
  const int64_t block = c_.draft_block_size;
  const int64_t d = c_.hidden_size;
  // Row k of every sequence's block.
  const auto rows_at = [&](Buffer& buffer, int64_t k) {
    TensorView view = buffer.Rows(t_).Rows(k, 1 + (num - 1) * block);
    view.rows = num;
    view.row_stride *= block;
    return view;
  };
  std::vector<int32_t> previous;
  std::vector<std::vector<int32_t>> drafted(requests.size());
  std::vector<std::vector<int32_t>> banned(requests.size());
  for (const DraftRequest& request : requests)
    previous.push_back(request.anchor);
  const TensorView logits = ws_.draft_logits.Rows(num);
  const TensorView confidence_in = ws_.confidence_in.Rows(num);
  const TensorView confidence = ws_.confidence.Rows(num);
  const TensorView markov = confidence_in.Cols(d, c_.draft_markov_rank);
  std::vector<ChoiceRow> choices(requests.size());
  for (int64_t k = 0; k < block; ++k) {
    ops_.embed({.table = w.markov_embed.view(), .ids = previous.data(), .out = markov}, launch_);
    ops_.add({.a = rows_at(ws_.final_h, k), .b = {}, .out = confidence_in.Cols(0, d)}, launch_);
    const LinearParams jobs[] = {
        {.weights = &w.markov_head, .x = markov, .y = logits},
        {.weights = &w.confidence_proj, .x = confidence_in, .y = confidence}};
    Linears(jobs);
    ops_.add({.a = rows_at(ws_.logits, k), .b = logits, .out = logits}, launch_);
    if (Observed()) observer_->Tensor(absl::StrCat("dspark.logits.", k), logits);
    for (size_t i = 0; i < requests.size(); ++i) {
      banned[i].clear();
      choices[i] =
          requests[i].sequence->MakeChoiceRow(requests[i].position + 1 + k, drafted[i], banned[i]);
      choices[i].num_logprobs = -1;
    }
    ops_.choose_tokens({.logits = logits, .rows = choices.data(), .tokens = previous.data()},
                       launch_);
    for (size_t i = 0; i < requests.size(); ++i) {
      previous[i] = std::max(previous[i], 0);  // a row that is not finite is seen by the target
      const size_t at = i * static_cast<size_t>(block) + static_cast<size_t>(k);
      drafts[at] = previous[i];
      confidences[at] = confidence.Row<float>(static_cast<int64_t>(i))[0];
      drafted[i].push_back(previous[i]);
    }
  }
}

}  // namespace twinspark
