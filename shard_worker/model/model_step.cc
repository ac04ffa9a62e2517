// A step: checks everything before it has any effect, packs rows into forward passes, draws and
// accepts, then drafts.
#include <algorithm>
#include <chrono>

#include "absl/strings/str_cat.h"

#include "common/limits.h"
#include "common/status_macros.h"
#include "shard_worker/model/model_impl.h"
#include "shard_worker/model/row_hints.h"

namespace twinspark {
namespace {

int64_t NowUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

absl::Status Model::Impl::PlanRound(const RoundSequence& round, Work& work) {
  ASSIGN_OR_RETURN(SequenceState * sequence, Slot(round.slot));
  const int64_t first = round.after_previous ? sequence->committed : round.first_position;
  if (first != sequence->committed ||
      static_cast<int64_t>(sequence->ids.size()) != sequence->committed + 1)
    return absl::InvalidArgumentError(
        absl::StrCat("slot ", round.slot, ": round at position ", first, ", committed length is ",
                     sequence->committed, " with ", sequence->ids.size(), " ids"));
  const std::vector<int32_t>& drafts = round.kept_drafts ? sequence->kept_drafts : round.drafts;
  if (round.num_drafts < 0 || round.num_drafts > limits::kMaxDrafts ||
      round.num_drafts > static_cast<int>(drafts.size()))
    return absl::InvalidArgumentError(absl::StrCat("slot ", round.slot, ": ", round.num_drafts,
                                                   " drafts asked for, ", drafts.size(),
                                                   " are there, at most ", limits::kMaxDrafts));
  if (!round.mask_ids.empty() && static_cast<int>(round.mask_ids.size()) != 1 + round.num_drafts)
    return absl::InvalidArgumentError(absl::StrCat("slot ", round.slot, ": ", round.mask_ids.size(),
                                                   " masks for ", 1 + round.num_drafts, " rows"));
  for (int32_t mask_id : round.mask_ids)
    RETURN_IF_ERROR(Mask(mask_id).status());
  work.row_ids = {sequence->ids.back()};
  work.row_ids.insert(work.row_ids.end(), drafts.begin(), drafts.begin() + round.num_drafts);
  RETURN_IF_ERROR(CheckIds(work.row_ids));
  work.sequence = sequence;
  work.slot = round.slot;
  work.draft_next = round.draft_next && weights_.draft && sequence->drafts_allowed;
  work.mask_ids = round.mask_ids;
  work.begin = first;
  work.end = first + 1 + round.num_drafts;
  work.is_round = true;
  return CheckPages(*sequence, round.slot, work.end);
}

absl::Status Model::Impl::PlanPrefill(const PrefillRange& range, Work& work) {
  ASSIGN_OR_RETURN(SequenceState * sequence, Slot(range.slot));
  if (range.begin != sequence->committed || range.end <= range.begin ||
      range.end > sequence->num_given)
    return absl::InvalidArgumentError(absl::StrCat(
        "slot ", range.slot, ": prefill of ", range.begin, "..", range.end,
        ", committed length is ", sequence->committed, " of ", sequence->num_given, " ids"));
  RETURN_IF_ERROR(Mask(range.mask_id).status());
  work.sequence = sequence;
  work.slot = range.slot;
  work.draft_next = range.draft_next && weights_.draft && sequence->drafts_allowed;
  work.prefill_mask = range.mask_id;
  work.begin = range.begin;
  work.end = range.end;
  return CheckPages(*sequence, range.slot, work.end);
}

absl::Status Model::Impl::PlanStep(const StepPlan& plan,
                                   std::span<SequenceResult> results,
                                   std::span<Work> works) {
  int64_t round_rows = 0;
  for (size_t i = 0; i < works.size(); ++i) {
    Work& work = works[i];
    work.result = &results[i];
    RETURN_IF_ERROR(i < plan.round.size() ? PlanRound(plan.round[i], work)
                                          : PlanPrefill(plan.prefill[i - plan.round.size()], work));
    work.result->slot = work.slot;
    if (work.is_round) round_rows += work.end - work.begin;
    for (size_t j = 0; j < i; ++j)
      if (works[j].slot == work.slot)
        return absl::InvalidArgumentError(
            absl::StrCat("slot ", work.slot, " is twice in one step"));
  }
  const int most = std::min(options_.limits.max_step_rows, options_.limits.max_logits_rows);
  if (round_rows <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("round of ", round_rows, " rows, at most ", most));
}

// Rows [at, at + rows) of a sequence's part of the step.
Segment Model::Impl::MakeSegment(const Work& work, int64_t at, int64_t rows) const {
  Segment segment;
  segment.slot = work.slot;
  segment.sequence = work.sequence;
  segment.first_position = at;
  if (work.is_round) {
    segment.ids = work.row_ids;
    segment.logits_rows = rows;
    return segment;
  }
  segment.ids =
      std::span(work.sequence->ids).subspan(static_cast<size_t>(at), static_cast<size_t>(rows));
  segment.logits_rows = at + rows == work.sequence->num_given ? 1 : 0;
  if (observe_all_logits_) segment.logits_rows = rows;
  return segment;
}

// Rows are packed in plan order into forward passes of at most max_step_rows; how they are packed
// does not change a bit of the results.
absl::Status Model::Impl::RunWorks(std::span<Work> works,
                                   RowClass row_class,
                                   XXH64_state_t* digest,
                                   StepResult& result) {
  std::vector<Work*> batch_works;
  std::vector<Segment> batch;
  int64_t batch_rows = 0;
  const auto flush = [&]() -> absl::Status {
    if (batch.empty()) return absl::OkStatus();
    RETURN_IF_ERROR(RunBatch(batch_works, batch, row_class, digest, result));
    batch.clear();
    batch_works.clear();
    batch_rows = 0;
    return absl::OkStatus();
  };
  for (Work& work : works) {
    for (int64_t at = work.begin; at < work.end;) {
      const int64_t room = options_.limits.max_step_rows - batch_rows;
      const int64_t left = work.end - at;
      if (room == 0 || (work.is_round && room < left) ||
          static_cast<int64_t>(batch.size()) >= options_.limits.max_logits_rows) {
        RETURN_IF_ERROR(flush());
        continue;
      }
      const int64_t rows = std::min(room, left);
      batch.push_back(MakeSegment(work, at, rows));
      batch_works.push_back(&work);
      batch_rows += rows;
      at += rows;
    }
  }
  return flush();
}

absl::StatusOr<StepResult> Model::Impl::RunStep(const StepPlan& plan) {
  StepResult result;
  result.sequences.resize(plan.round.size() + plan.prefill.size());
  std::vector<Work> works(result.sequences.size());
  RETURN_IF_ERROR(PlanStep(plan, result.sequences, works));

  const ThreadPool::Step step(pool_);
  forward_->ResetTimings();
  forward_->trace().Reset();
  forward_->trace().SetEnabled(options_.world > 1);
  const std::unique_ptr<XXH64_state_t, decltype(&XXH64_freeState)> digest(XXH64_createState(),
                                                                          XXH64_freeState);
  XXH64_reset(digest.get(), 0);
  const RowClass row_class = plan.bulk ? RowClass::kBulk : RowClass::kDecode;
  RETURN_IF_ERROR(RunWorks(works, row_class, digest.get(), result));
  result.residual_digest = XXH64_digest(digest.get());
  const int64_t start = NowUs();
  HintNextRound(works, AnchorRow);
  RETURN_IF_ERROR(MakeDrafts(works));
  HintNextRound(works, DraftRows);
  result.timings.draft_us = NowUs() - start;
  result.shared_digest = forward_->trace().digest();
  result.timings.engram_wait_us = forward_->engram_wait_us();
  result.timings.collectives_us = forward_->collectives_us();
  return result;
}

absl::Status Model::Impl::RunBatch(std::span<Work*> works,
                                   std::span<Segment> segments,
                                   RowClass row_class,
                                   XXH64_state_t* digest,
                                   StepResult& result) {
  const int64_t start = NowUs();
  const std::vector<Segment> next = RowsAfter(segments, options_.limits.max_step_rows);
  RETURN_IF_ERROR(forward_->Run(segments, row_class, next));
  const ConstTensorView streams = forward_->streams();
  XXH64_update(digest, streams.data,
               static_cast<size_t>(streams.rows * streams.cols) * DTypeBytes(streams.dtype));
  const int64_t sample_start = NowUs();
  result.timings.forward_us += sample_start - start;
  RETURN_IF_ERROR(Choose(works, segments));
  RETURN_IF_ERROR(PromptLogprobs(works, segments));
  result.timings.sample_us += NowUs() - sample_start;
  return absl::OkStatus();
}

// Draws a token for every row with logits, then accepts per sequence.
absl::Status Model::Impl::Choose(std::span<Work*> works, std::span<const Segment> segments) {
  const ConstTensorView logits = forward_->logits();
  const size_t num_rows = static_cast<size_t>(logits.rows);
  std::vector<ChoiceRow> rows(num_rows);
  std::vector<std::vector<int32_t>> banned(num_rows);
  size_t at = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    const Work& work = *works[i];
    const int64_t first = segment.first_position + segment.num_rows() - segment.logits_rows;
    for (int64_t j = 0; j < segment.logits_rows; ++j, ++at) {
      const std::span<const int32_t> drafted = work.is_round
                                                   ? segment.ids.subspan(1, static_cast<size_t>(j))
                                                   : std::span<const int32_t>();
      rows[at] = work.sequence->MakeChoiceRow(first + j + 1, drafted, banned[at]);
      const int32_t mask_id = !work.is_round          ? work.prefill_mask
                              : work.mask_ids.empty() ? -1
                                                      : work.mask_ids[static_cast<size_t>(j)];
      ASSIGN_OR_RETURN(rows[at].grammar_mask, Mask(mask_id));
    }
  }
  RunChoice(logits, rows);
  at = 0;
  for (size_t i = 0; i < segments.size(); ++i) {
    Work& work = *works[i];
    const size_t count = static_cast<size_t>(segments[i].logits_rows);
    const bool samples = work.is_round || segments[i].first_position + segments[i].num_rows() ==
                                              work.sequence->num_given;
    work.sequence->committed = segments[i].first_position + segments[i].num_rows();
    if (samples) {
      // With every row's logits wanted (tests) a prefill samples from its last row only.
      const size_t skip = work.is_round ? 0 : count - 1;
      Accept(work, std::span(chosen_).subspan(at + skip, count - skip), at + skip);
    }
    at += count;
  }
  return absl::OkStatus();
}

// Fills chosen_, non_finite_ and, where rows ask for them, the log-probabilities.
void Model::Impl::RunChoice(const ConstTensorView& logits, std::span<const ChoiceRow> rows) {
  int most_logprobs = -1;
  for (const ChoiceRow& row : rows)
    most_logprobs = std::max(most_logprobs, row.num_logprobs);
  chosen_.assign(rows.size(), -1);
  non_finite_.assign(rows.size(), 0);
  logprob_stride_ = most_logprobs + 1;
  logprob_ids_.resize(rows.size() * static_cast<size_t>(logprob_stride_));
  logprobs_.resize(logprob_ids_.size());
  logprob_ranks_.resize(rows.size());
  if (rows.empty()) return;
  ChooseTokensParams params;
  params.logits = logits;
  params.rows = rows.data();
  params.tokens = chosen_.data();
  params.non_finite = non_finite_.data();
  if (logprob_stride_ > 0) {
    params.logprob_ids = logprob_ids_.data();
    params.logprobs = logprobs_.data();
    params.logprob_stride = logprob_stride_;
    params.logprob_ranks = logprob_ranks_.data();
  }
  Ops().choose_tokens(params, forward_->launch());
}

TokenLogprobs Model::Impl::LogprobsOfRow(size_t row, int32_t num_top) const {
  const size_t at = row * static_cast<size_t>(logprob_stride_);
  TokenLogprobs result;
  result.token = {logprob_ids_[at], logprobs_[at]};
  result.rank = logprob_ranks_[row];
  for (size_t n = 1; n <= static_cast<size_t>(num_top); ++n)
    result.top.push_back({logprob_ids_[at + n], logprobs_[at + n]});
  return result;
}

// The row at position p speaks about the prompt token at p + 1. Rows go through the head in groups
// of at most max_logits_rows, so that memory does not grow with the chunk; how they are grouped
// does not change a bit.
absl::Status Model::Impl::PromptLogprobs(std::span<Work*> works,
                                         std::span<const Segment> segments) {
  for (size_t i = 0; i < segments.size(); ++i) {
    const Segment& segment = segments[i];
    Work& work = *works[i];
    if (work.is_round || work.sequence->num_prompt_logprobs < 0) continue;
    const int64_t end =
        std::min(segment.first_position + segment.num_rows(), work.sequence->num_prompt_ids - 1);
    for (int64_t p = segment.first_position; p < end;) {
      const int64_t count = std::min<int64_t>(options_.limits.max_logits_rows, end - p);
      ASSIGN_OR_RETURN(
          const ConstTensorView logits,
          forward_->LogitsOfRows(segment.row_begin + p - segment.first_position, count));
      AddPromptLogprobs(work, logits, p);
      p += count;
    }
  }
  return absl::OkStatus();
}

// Every rank looks whether the rows are finite; only rank 0's lists travel.
void Model::Impl::AddPromptLogprobs(Work& work,
                                    const ConstTensorView& logits,
                                    int64_t first_position) {
  const SequenceState& sequence = *work.sequence;
  std::vector<ChoiceRow> rows(static_cast<size_t>(logits.rows));
  for (size_t j = 0; j < rows.size(); ++j) {
    rows[j].given_token = sequence.ids[static_cast<size_t>(first_position) + j + 1];
    rows[j].num_logprobs = options_.rank == 0 ? sequence.num_prompt_logprobs : -1;
  }
  RunChoice(logits, rows);
  SequenceResult& result = *work.result;
  for (size_t j = 0; j < rows.size(); ++j) {
    if (non_finite_[j] != 0) {
      // As when it is drawn from: the gateway fails this request and closes the slot.
      result.non_finite = true;
      result.tokens.clear();
      result.logprobs.clear();
      work.draft_next = false;
      return;
    }
    if (options_.rank == 0)
      result.prompt_logprobs.push_back(LogprobsOfRow(j, sequence.num_prompt_logprobs));
  }
}

// The longest prefix of drafts that agrees with the draws, and the draw after it (dspark
// specification 2.2, 2.3). Rejected rows need no undo: they lie behind the committed length.
void Model::Impl::Accept(Work& work, std::span<const int32_t> tokens, size_t first_row) {
  SequenceState& sequence = *work.sequence;
  SequenceResult& result = *work.result;
  const std::vector<int32_t>& rows = work.row_ids;  // empty for a prefill
  sequence.kept_drafts.clear();
  size_t m = 0;
  while (m + 1 < tokens.size() && tokens[m] == rows[m + 1] && non_finite_[first_row + m] == 0)
    ++m;
  if (work.is_round) sequence.committed = work.begin;
  for (size_t j = 0; j <= m; ++j)
    if (non_finite_[first_row + j] != 0 || tokens[j] < 0) {
      // Nothing is committed; the gateway fails this request and closes the slot.
      result.non_finite = true;
      work.draft_next = false;
      return;
    }
  result.accepted = static_cast<int>(m);
  if (work.is_round) sequence.committed = work.begin + static_cast<int64_t>(m) + 1;
  const std::vector<int32_t>& stops = sequence.sampling.stop_ids;
  for (size_t j = 0; j <= m; ++j) {
    const int32_t token = tokens[j];
    sequence.Append(token);
    result.tokens.push_back(token);
    if (result.stop_index < 0 && std::find(stops.begin(), stops.end(), token) != stops.end())
      result.stop_index = static_cast<int>(j);
    if (sequence.sampling.num_logprobs >= 0)
      result.logprobs.push_back(LogprobsOfRow(first_row + j, sequence.sampling.num_logprobs));
  }
}

// Of every sequence that goes on: the rows named by `rows_of`.
void Model::Impl::HintNextRound(std::span<const Work> works,
                                Segment (*rows_of)(int slot, const SequenceState& sequence)) {
  std::vector<Segment> next;
  for (const Work& work : works) {
    if (work.result->tokens.empty()) continue;
    const Segment rows = rows_of(work.slot, *work.sequence);
    if (!rows.ids.empty()) next.push_back(rows);
  }
  forward_->HintRows(next, RowClass::kAhead);
}

absl::Status Model::Impl::MakeDrafts(std::span<Work> works) {
  std::vector<DraftRequest> requests;
  std::vector<Work*> asked;
  for (Work& work : works) {
    if (!work.draft_next || work.result->tokens.empty()) continue;
    DraftRequest request;
    request.slot = work.slot;
    request.sequence = work.sequence;
    request.position = work.sequence->committed;
    request.anchor = work.sequence->ids.back();
    requests.push_back(request);
    asked.push_back(&work);
  }
  if (requests.empty()) return absl::OkStatus();
  const size_t block = static_cast<size_t>(config_.draft_block_size);
  std::vector<int32_t> drafts(requests.size() * block);
  std::vector<float> confidences(drafts.size());
  RETURN_IF_ERROR(forward_->Draft(requests, drafts, confidences));
  for (size_t i = 0; i < asked.size(); ++i) {
    SequenceResult& result = *asked[i]->result;
    const auto at = static_cast<std::ptrdiff_t>(i * block);
    const auto end = at + static_cast<std::ptrdiff_t>(block);
    result.drafts.assign(drafts.begin() + at, drafts.begin() + end);
    result.draft_confidences.assign(confidences.begin() + at, confidences.begin() + end);
    asked[i]->sequence->kept_drafts = result.drafts;
  }
  return absl::OkStatus();
}

}  // namespace twinspark
