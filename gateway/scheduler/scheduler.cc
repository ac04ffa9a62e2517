#include "gateway/scheduler/scheduler.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "gateway/scheduler/draft_policy.h"

namespace twinspark::gateway {
namespace {

// Every so many bulk chunks the oldest long prompt goes first; else the one nearest its end.
constexpr uint64_t kOldestFirstEvery = 4;
// Time owed between decoding and bulk prefill is forgotten beyond this.
constexpr double kMaxDebtMs = 500;

uint32_t DeadlineMs(double predicted_ms) {
  const double wanted = 8 * predicted_ms * static_cast<double>(limits::kTimeScale);
  return static_cast<uint32_t>(std::clamp(wanted, static_cast<double>(limits::kOpDeadlineMsMin),
                                          static_cast<double>(limits::kOpDeadlineMsMax)));
}

int32_t Size(const std::vector<int32_t>& ids) {
  return static_cast<int32_t>(ids.size());
}

}  // namespace

Scheduler::Scheduler(const SchedulerConfig& config) : config_(config), queue_(config.max_queue) {}

absl::StatusOr<int32_t> Scheduler::ResolveMaxTokens(const SchedulerConfig& config,
                                                    const EpochLimits& epoch,
                                                    int32_t num_prompt_ids,
                                                    int32_t max_tokens) {
  if (num_prompt_ids < 1) return absl::InvalidArgumentError("the prompt has no tokens");
  // All ids but the last one occupy a position in the pages.
  const int64_t page_capacity = int64_t{epoch.num_pages} * limits::kPageTokens + 1;
  const int64_t capacity = std::min<int64_t>(epoch.max_context, page_capacity);
  const int64_t wanted = int64_t{num_prompt_ids} + std::max<int32_t>(max_tokens, 1);
  if (wanted > capacity) {
    return absl::InvalidArgumentError(absl::StrCat(
        "This model's maximum context length is ", capacity, " tokens. However, you requested ",
        wanted, " tokens (", num_prompt_ids, " in the prompt, ", std::max<int32_t>(max_tokens, 1),
        " for the completion). Please reduce the length of the prompt or the completion."));
  }
  if (max_tokens > 0) return max_tokens;
  return static_cast<int32_t>(
      std::min<int64_t>(config.max_output_default, capacity - num_prompt_ids));
}

absl::Status Scheduler::Add(SequenceId id, SequenceSpec spec, int64_t now_us) {
  CHECK_GT(id, last_sequence_id_);
  last_sequence_id_ = id;
  auto max_tokens = ResolveMaxTokens(config_, epoch_, Size(spec.prompt_ids), spec.max_tokens);
  if (!max_tokens.ok()) return max_tokens.status();
  if (queue_.full()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the queue is full: ", queue_.size(), " requests wait"));
  }
  auto sequence = std::make_unique<Sequence>();
  sequence->id = id;
  sequence->request_hash = spec.request_hash;
  sequence->num_prompt_ids = Size(spec.prompt_ids);
  sequence->max_total_ids = sequence->num_prompt_ids + *max_tokens;
  sequence->ids = std::move(spec.prompt_ids);
  const int wanted_drafts = spec.max_drafts < 0 ? config_.num_drafts : spec.max_drafts;
  sequence->max_drafts = std::min(wanted_drafts, epoch_.max_drafts);
  sequence->run_ahead_allowed = spec.run_ahead_allowed;
  sequence->sampling = std::make_shared<const SamplingParams>(std::move(spec.sampling));
  sequence->enqueue_us = now_us;
  CHECK(queue_.Push(id));
  sequences_.emplace(id, std::move(sequence));
  return absl::OkStatus();
}

void Scheduler::End(SequenceId id, EndReason reason) {
  const auto it = sequences_.find(id);
  if (it != sequences_.end()) EndSequence(*it->second, reason);
}

std::optional<StepPlan> Scheduler::NextStep(int64_t now_us) {
  if (!in_epoch_ || in_flight_.size() >= limits::kMaxOpsInFlight) return std::nullopt;
  if (!in_flight_.empty() && !config_.run_ahead && pending_closes_.empty()) return std::nullopt;
  if (!in_flight_.empty() && in_flight_.back().may_be_refused) return std::nullopt;

  StepPlan plan;
  OpInFlight op;
  if (in_flight_.empty() || config_.run_ahead) PlanWork(now_us, plan, op);
  if (pending_closes_.empty() && plan.controls.empty() && plan.round.empty() &&
      plan.short_prefill.empty() && !plan.chunk) {
    return std::nullopt;
  }
  Seal(plan, std::move(op));
  return plan;
}

void Scheduler::PlanWork(int64_t now_us, StepPlan& plan, OpInFlight& op) {
  if (ChunkHasTurn()) {
    Admit(now_us, plan, op);
    PlanChunk(plan, op);
    return;
  }
  // Rounds come before admission, so that their pages (and a preemption for them) do. While they
  // wait for a result nothing else overtakes them.
  if (!PlanRound(plan, op)) return;
  Admit(now_us, plan, op);
  PlanShortPrefill(plan, op);
  if (plan.round.empty() && plan.short_prefill.empty() && ChunkHasTurn()) PlanChunk(plan, op);
}

// ---- Admission ---------------------------------------------------------------------------------

void Scheduler::Admit(int64_t now_us, StepPlan& plan, OpInFlight& op) {
  int64_t num_ids = 0;  // of this op: it has to fit into one message
  while (const std::optional<SequenceId> front = queue_.Front()) {
    const auto free_slot = std::find(slot_owner_.begin(), slot_owner_.end(), SequenceId{0});
    if (free_slot == slot_owner_.end()) return;
    Sequence& sequence = *sequences_.at(*front);
    if (sequence.opens_alone && !op.opened.empty()) return;
    // One page is left to each running sequence, so that the newcomer is not preempted at once.
    // With nobody running it always fits (ResolveMaxTokens).
    const int32_t need = KvBlockManager::PagesFor(Size(sequence.ids)) + num_running();
    if (need > blocks_.num_free()) return;
    num_ids += Size(sequence.ids);
    if (num_ids > limits::kMaxPromptIds) return;
    queue_.Remove(sequence.id);
    Open(sequence, static_cast<int>(free_slot - slot_owner_.begin()), now_us, plan, op);
    if (sequence.opens_alone) return;
  }
}

void Scheduler::Open(Sequence& sequence, int slot, int64_t now_us, StepPlan& plan, OpInFlight& op) {
  slot_owner_[static_cast<size_t>(slot)] = sequence.id;
  active_.insert(std::upper_bound(active_.begin(), active_.end(), sequence.id,
                                  [](SequenceId id, const Sequence* s) { return id < s->id; }),
                 &sequence);
  ResetSlotState(sequence);
  sequence.slot = slot;
  sequence.phase = SequencePhase::kPrefilling;
  sequence.num_open_ids = Size(sequence.ids);
  ++sequence.incarnation;
  if (sequence.admit_us == 0) {
    sequence.admit_us = now_us;
    AddEvent(sequence, SequenceEvent::Kind::kAdmitted);
  }

  sequence.reports_prompt_logprobs =
      sequence.sampling->num_prompt_logprobs >= 0 && !sequence.prompt_logprobs_sent;
  op.opened.push_back({sequence.id, sequence.incarnation, slot});
  if (sequence.reports_prompt_logprobs || sequence.opens_alone) op.may_be_refused = true;
  plan.controls.push_back(OpenSequence{.slot = slot,
                                       .request_hash = sequence.request_hash,
                                       .ids = sequence.ids,
                                       .num_prompt_ids = sequence.num_prompt_ids,
                                       .sampling = sequence.sampling,
                                       .draft_allowed = sequence.max_drafts > 0,
                                       .wants_prompt_logprobs = sequence.reports_prompt_logprobs});
  if (!sequence.sampling->allowed_token_ids.empty()) {
    plan.controls.push_back(SetMask{static_cast<uint32_t>(slot) + 1, epoch_.vocab_size,
                                    sequence.sampling->allowed_token_ids});
  }
  CHECK(blocks_.Take(KvBlockManager::PagesFor(sequence.num_open_ids), sequence.pages));
  MapPages map;
  map.slot = slot;
  for (size_t i = 0; i < sequence.pages.size(); ++i) {
    map.pages.push_back({static_cast<int32_t>(i), sequence.pages[i]});
  }
  plan.controls.push_back(std::move(map));
}

// ---- Rounds ------------------------------------------------------------------------------------

bool Scheduler::MayRunAhead(const Sequence& sequence) const {
  if (sequence.num_ops_in_flight == 0) return true;
  // Within two rounds of its end the next position may not exist.
  const int reach = sequence.max_growth_in_flight + 1 + sequence.max_drafts;
  return sequence.run_ahead_allowed && sequence.num_remaining() > reach;
}

// One round of every decoding sequence. False: one of them must wait for the result of an op in
// flight, and then all do; they would otherwise drift into alternating, half-empty rounds.
bool Scheduler::PlanRound(StepPlan& plan, OpInFlight& op) {
  std::vector<Sequence*> candidates;
  for (Sequence* sequence : active_) {
    if (sequence->phase != SequencePhase::kDecoding) continue;
    if (!MayRunAhead(*sequence)) return false;
    candidates.push_back(sequence);
  }
  if (candidates.empty()) return true;
  // Taking turns: begin after the one served last, when there are too many for one round.
  if (static_cast<int>(candidates.size()) > epoch_.max_round_rows) {
    const auto first = std::find_if(candidates.begin(), candidates.end(),
                                    [&](const Sequence* s) { return s->id > last_served_; });
    std::rotate(candidates.begin(), first, candidates.end());
    candidates.resize(static_cast<size_t>(epoch_.max_round_rows));
    last_served_ = candidates.back()->id;
  }
  std::vector<int> wanted;
  for (const Sequence* sequence : candidates) {
    wanted.push_back(MaxDraftsOfRound(*sequence, sequence->max_growth_in_flight));
  }
  const std::vector<int> depths = AllocateDrafts(wanted, epoch_.max_round_rows);
  if (!MapRoundPages(candidates, depths, plan)) return false;

  const bool room_for_drafts = 2 * static_cast<int>(candidates.size()) <= epoch_.max_round_rows;
  for (size_t i = 0; i < candidates.size(); ++i) {
    if (candidates[i] == nullptr) continue;  // preempted
    Sequence& sequence = *candidates[i];
    const bool ahead = sequence.num_ops_in_flight > 0;
    const int k = depths[i];
    const int remaining_after = sequence.num_remaining() - sequence.num_ops_in_flight - 1;
    RoundSequence rows{.sequence_id = sequence.id, .slot = sequence.slot, .k = k};
    rows.after_previous = ahead && sequence.previous_is_round;
    // After a prefill in flight the anchor stands right behind the ids; else it is the last id.
    rows.first_position = Size(sequence.ids) - (ahead ? 0 : 1);
    rows.draft_next = room_for_drafts && DraftsWanted(sequence, remaining_after);
    if (!sequence.sampling->allowed_token_ids.empty()) {
      rows.mask_id = static_cast<uint32_t>(sequence.slot) + 1;
    }
    plan.round.push_back(rows);
    op.round.push_back({sequence.id, sequence.incarnation, k + 1, k});
    op.round_rows += 1 + k;

    sequence.num_kept_drafts = rows.draft_next ? epoch_.max_drafts : 0;
    sequence.max_growth_in_flight += k + 1;
    sequence.previous_is_round = true;
    ++sequence.num_ops_in_flight;
  }
  return true;
}

// Maps the pages that the rows of the round may touch, oldest sequence first. On shortage the
// youngest sequence of all gives way; its entry in `candidates` becomes null. With an op in flight
// nobody is preempted: returns false, and the round waits for the result.
bool Scheduler::MapRoundPages(std::vector<Sequence*>& candidates,
                              const std::vector<int>& depths,
                              StepPlan& plan) {
  std::vector<size_t> by_age(candidates.size());
  for (size_t i = 0; i < by_age.size(); ++i)
    by_age[i] = i;
  std::sort(by_age.begin(), by_age.end(),
            [&](size_t a, size_t b) { return candidates[a]->id < candidates[b]->id; });

  std::vector<int32_t> missing(candidates.size());
  int32_t total_missing = 0;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Sequence& sequence = *candidates[i];
    // Rows P .. P + k with P at most ids.size() - 1 + growth.
    const int64_t positions =
        int64_t{Size(sequence.ids)} + sequence.max_growth_in_flight + depths[i];
    missing[i] = std::max(0, KvBlockManager::PagesFor(positions) - Size(sequence.pages));
    total_missing += missing[i];
  }
  if (!in_flight_.empty() && total_missing > blocks_.num_free()) return false;

  for (const size_t i : by_age) {
    if (candidates[i] == nullptr) continue;
    Sequence& sequence = *candidates[i];
    while (missing[i] > blocks_.num_free()) {
      Sequence& youngest = *active_.back();
      const auto planned = std::find(candidates.begin(), candidates.end(), &youngest);
      if (planned != candidates.end()) *planned = nullptr;
      Preempt(youngest);
      if (&youngest == &sequence) break;
    }
    if (candidates[i] == nullptr || missing[i] == 0) continue;
    MapPages map;
    map.slot = sequence.slot;
    const int32_t first = Size(sequence.pages);
    CHECK(blocks_.Take(missing[i], sequence.pages));
    for (int32_t page = first; page < Size(sequence.pages); ++page) {
      map.pages.push_back({page, sequence.pages[static_cast<size_t>(page)]});
    }
    plan.controls.push_back(std::move(map));
  }
  return true;
}

// ---- Prefill -----------------------------------------------------------------------------------

bool Scheduler::IsLong(const Sequence& sequence) const {
  return sequence.num_open_ids - sequence.num_planned > epoch_.max_short_prefill_rows;
}

bool Scheduler::ChunkInFlight() const {
  return std::any_of(in_flight_.begin(), in_flight_.end(),
                     [](const OpInFlight& op) { return op.chunk.has_value(); });
}

// Bulk prefill runs alone in its op, so that rounds do not wait for it in the same result; time is
// shared between the two by what each has had.
bool Scheduler::ChunkHasTurn() {
  bool long_prompts = false;
  bool others = false;
  for (const Sequence* sequence : active_) {
    const bool is_long = sequence->phase == SequencePhase::kPrefilling && IsLong(*sequence);
    (is_long ? long_prompts : others) = true;
  }
  if (!long_prompts || !others) prefill_debt_ms_ = 0;
  if (!long_prompts || ChunkInFlight()) return false;
  return !others || prefill_debt_ms_ > 0;
}

PrefillRange Scheduler::PlanRange(Sequence& sequence, int32_t rows, RowsInFlight& in_flight) {
  PrefillRange range{.sequence_id = sequence.id, .slot = sequence.slot};
  range.begin = sequence.num_planned;
  range.end = sequence.num_planned + rows;
  range.ends_prompt = range.end == sequence.num_open_ids;
  in_flight = {sequence.id, sequence.incarnation, range.ends_prompt ? 1 : 0};
  if (sequence.reports_prompt_logprobs) {
    // A row speaks about the id behind it; the last one of the prompt about an output.
    in_flight.num_prompt_logprobs =
        std::max(0, std::min(range.end, sequence.num_prompt_ids - 1) - range.begin);
  }

  sequence.num_planned = range.end;
  ++sequence.num_ops_in_flight;
  sequence.max_growth_in_flight += in_flight.growth;
  sequence.previous_is_round = false;
  if (range.ends_prompt) {
    range.draft_next = DraftsWanted(sequence, sequence.num_remaining() - 1);
    if (!sequence.sampling->allowed_token_ids.empty()) {
      range.mask_id = static_cast<uint32_t>(sequence.slot) + 1;
    }
    sequence.phase = SequencePhase::kDecoding;
    sequence.num_kept_drafts = range.draft_next ? epoch_.max_drafts : 0;
  }
  return range;
}

void Scheduler::PlanShortPrefill(StepPlan& plan, OpInFlight& op) {
  int budget = std::min(epoch_.max_short_prefill_rows - op.round_rows,
                        cost_.PrefillRowsWithin(config_.chunk_target_ms));
  for (Sequence* sequence : active_) {
    if (budget <= 0) return;
    if (sequence->phase != SequencePhase::kPrefilling || IsLong(*sequence)) continue;
    const int32_t rows = std::min(sequence->num_open_ids - sequence->num_planned, budget);
    plan.short_prefill.push_back(PlanRange(*sequence, rows, op.short_prefill.emplace_back()));
    op.has_prompt_logprobs |= sequence->reports_prompt_logprobs;
    op.prefill_rows += rows;
    budget -= rows;
  }
}

void Scheduler::PlanChunk(StepPlan& plan, OpInFlight& op) {
  Sequence* chosen = nullptr;
  bool others = false;
  const bool oldest_first = next_chunk_id_ % kOldestFirstEvery == 0;
  for (Sequence* sequence : active_) {
    if (sequence->phase != SequencePhase::kPrefilling || !IsLong(*sequence)) {
      others = true;
      continue;
    }
    const auto left = [](const Sequence& s) { return s.num_open_ids - s.num_planned; };
    if (chosen == nullptr || (!oldest_first && left(*sequence) < left(*chosen))) chosen = sequence;
  }
  CHECK(chosen != nullptr);
  const double target_ms = others ? config_.busy_chunk_target_ms : config_.chunk_target_ms;
  // Rows whose logits are wanted cost more than the model of cost knows, and make long results.
  op.has_prompt_logprobs = chosen->reports_prompt_logprobs;
  const int32_t most_rows = op.has_prompt_logprobs
                                ? std::min(epoch_.max_chunk_rows, epoch_.max_short_prefill_rows)
                                : epoch_.max_chunk_rows;
  const int32_t rows = std::min(
      {chosen->num_open_ids - chosen->num_planned, most_rows, cost_.PrefillRowsWithin(target_ms)});
  RowsInFlight& in_flight =
      op.chunk.emplace(RowsInFlight());  // clang: no emplace() inside Scheduler
  plan.chunk = ChunkSlice{next_chunk_id_++, epoch_.num_layers, PlanRange(*chosen, rows, in_flight)};
  op.prefill_rows = rows;
}

// ---- Sending and results -----------------------------------------------------------------------

void Scheduler::Seal(StepPlan& plan, OpInFlight op) {
  std::vector<Control> controls;
  for (const int slot : pending_closes_)
    controls.push_back(CloseSequence{slot});
  op.closed = std::exchange(pending_closes_, {});
  for (Control& control : plan.controls)
    controls.push_back(std::move(control));
  plan.controls = std::move(controls);

  plan.op_id = next_op_id_++;
  plan.predicted_ms = cost_.PredictMs(op.round_rows, op.prefill_rows);
  double queued_ms = plan.predicted_ms;
  for (const OpInFlight& earlier : in_flight_)
    queued_ms += earlier.predicted_ms;
  plan.deadline_ms = DeadlineMs(queued_ms);

  const double share = op.chunk ? -config_.decode_share : 1 - config_.decode_share;
  prefill_debt_ms_ =
      std::clamp(prefill_debt_ms_ + share * plan.predicted_ms, -kMaxDebtMs, kMaxDebtMs);

  ++counters_.num_ops;
  if (!in_flight_.empty()) ++counters_.num_run_ahead;
  if (!plan.round.empty()) ++counters_.num_rounds;
  counters_.num_prefill_rows += static_cast<uint64_t>(op.prefill_rows);
  op.op_id = plan.op_id;
  op.predicted_ms = plan.predicted_ms;
  in_flight_.push_back(std::move(op));
}

absl::Status Scheduler::CheckResult(const OpInFlight& op, const StepResult& result) const {
  if (result.op_id != op.op_id || result.round.size() != op.round.size() ||
      result.short_prefill.size() != op.short_prefill.size() ||
      result.chunk.has_value() != op.chunk.has_value()) {
    return absl::InternalError(
        absl::StrCat("the result of op ", result.op_id, " (", result.round.size(), " + ",
                     result.short_prefill.size(), " + ", result.chunk.has_value(),
                     " sequences) does not answer op ", op.op_id, " (", op.round.size(), " + ",
                     op.short_prefill.size(), " + ", op.chunk.has_value(), ")"));
  }
  const auto check = [&](const RowsInFlight& rows, const SequenceResult& sequence, bool is_round) {
    const size_t count = sequence.tokens.size();
    const bool right = is_round ? count == static_cast<size_t>(sequence.num_accepted) + 1 &&
                                      sequence.num_accepted <= rows.k
                                : count == static_cast<size_t>(rows.growth);
    const bool logprobs_right =
        (sequence.logprobs.empty() || sequence.logprobs.size() == count) &&
        sequence.prompt_logprobs.size() == static_cast<size_t>(rows.num_prompt_logprobs);
    if ((right && logprobs_right) || sequence.non_finite) return absl::OkStatus();
    return absl::InternalError(
        absl::StrCat("op ", op.op_id, " slot ", sequence.slot, ": ", count, " tokens, ",
                     sequence.logprobs.size(), " logprobs and ", sequence.prompt_logprobs.size(),
                     " of ", rows.num_prompt_logprobs, " prompt logprobs with ",
                     sequence.num_accepted, " of ", rows.k, " drafts accepted"));
  };
  absl::Status status;
  for (size_t i = 0; i < op.round.size(); ++i) {
    status.Update(check(op.round[i], result.round[i], true));
  }
  for (size_t i = 0; i < op.short_prefill.size(); ++i) {
    status.Update(check(op.short_prefill[i], result.short_prefill[i], false));
  }
  if (op.chunk) status.Update(check(*op.chunk, *result.chunk, false));
  return status;
}

absl::Status Scheduler::Apply(const StepResult& result) {
  if (in_flight_.empty()) {
    return absl::InternalError(absl::StrCat("result of op ", result.op_id, ": none is in flight"));
  }
  if (absl::Status status = CheckResult(in_flight_.front(), result); !status.ok()) return status;
  const OpInFlight op = std::move(in_flight_.front());
  in_flight_.pop_front();

  const double measured_ms = result.compute_us / 1000.0;
  if (!op.has_prompt_logprobs) cost_.Learn(op.round_rows, op.prefill_rows, measured_ms);
  if (measured_ms > 0) {
    const double share = op.chunk ? -config_.decode_share : 1 - config_.decode_share;
    prefill_debt_ms_ += share * (measured_ms - op.predicted_ms);
  }
  for (size_t i = 0; i < op.round.size(); ++i) {
    ApplyDraftCounts(op.round[i], result.round[i]);
    ApplyRows(op.round[i], result.round[i]);
  }
  for (size_t i = 0; i < op.short_prefill.size(); ++i) {
    ApplyRows(op.short_prefill[i], result.short_prefill[i]);
  }
  if (op.chunk) ApplyRows(*op.chunk, *result.chunk);
  return absl::OkStatus();
}

absl::Status Scheduler::ApplyRefusal(uint64_t op_id, const absl::Status& refusal) {
  if (in_flight_.empty() || in_flight_.front().op_id != op_id) {
    return absl::InternalError(absl::StrCat("op ", op_id, " was refused and is not in flight"));
  }
  if (in_flight_.size() > 1 || in_flight_.front().opened.empty()) return refusal;
  const OpInFlight op = std::move(in_flight_.front());
  in_flight_.pop_front();
  for (const OpenInFlight& open : op.opened)
    TakeBackOpen(open, /*is_to_blame=*/op.opened.size() == 1, refusal);
  pending_closes_.insert(pending_closes_.begin(), op.closed.begin(), op.closed.end());
  for (const RowsInFlight& rows : op.round)
    WaitAgain(rows);
  for (const RowsInFlight& rows : op.short_prefill)
    WaitAgain(rows);
  if (op.chunk) WaitAgain(*op.chunk);
  return absl::OkStatus();
}

// The workers never heard of the sequence: no CloseSequence may follow.
void Scheduler::TakeBackOpen(const OpenInFlight& open,
                             bool is_to_blame,
                             const absl::Status& refusal) {
  const auto it = sequences_.find(open.sequence_id);
  if (it == sequences_.end() || it->second->incarnation != open.incarnation ||
      it->second->slot < 0) {
    // Ended meanwhile: its close waits to be sent.
    const auto close = std::find(pending_closes_.begin(), pending_closes_.end(), open.slot);
    CHECK(close != pending_closes_.end()) << "slot " << open.slot;
    pending_closes_.erase(close);
    return;
  }
  Sequence& sequence = *it->second;
  ReleaseSlot(sequence);
  pending_closes_.pop_back();
  queue_.PutBack(sequence.id);
  sequence.opens_alone = true;
  if (is_to_blame) Fail(sequence, refusal);
}

// Rows of a refused op: the sequence is closed and opened again with what it has, which loses
// nothing.
void Scheduler::WaitAgain(const RowsInFlight& rows) {
  const auto it = sequences_.find(rows.sequence_id);
  if (it == sequences_.end() || it->second->incarnation != rows.incarnation ||
      it->second->slot < 0) {
    return;
  }
  ReleaseSlot(*it->second);
  queue_.PutBack(rows.sequence_id);
}

void Scheduler::ApplyDraftCounts(const RowsInFlight& rows, const SequenceResult& result) {
  if (rows.k == 0) return;
  ++counters_.num_draft_rounds;
  counters_.num_drafted += static_cast<uint64_t>(rows.k);
  counters_.num_accepted += static_cast<uint64_t>(result.num_accepted);
  for (int j = 0; j < result.num_accepted; ++j)
    ++counters_.accepted_at[j];
}

void Scheduler::ApplyRows(const RowsInFlight& rows, const SequenceResult& result) {
  const auto it = sequences_.find(rows.sequence_id);
  if (it == sequences_.end() || it->second->incarnation != rows.incarnation ||
      it->second->slot < 0) {
    counters_.num_dropped += result.tokens.size();  // ended or preempted meanwhile
    return;
  }
  Sequence& sequence = *it->second;
  --sequence.num_ops_in_flight;
  sequence.max_growth_in_flight -= rows.growth;
  if (result.non_finite) {
    Fail(sequence, absl::InternalError("the model computed logits that are not finite"));
    return;
  }
  if (sequence.reports_prompt_logprobs && !sequence.prompt_logprobs_sent) {
    sequence.prompt_logprobs.insert(sequence.prompt_logprobs.end(), result.prompt_logprobs.begin(),
                                    result.prompt_logprobs.end());
    if (!result.tokens.empty()) {
      sequence.prompt_logprobs_sent = true;
      AddEvent(sequence, SequenceEvent::Kind::kPromptLogprobs).logprobs =
          std::exchange(sequence.prompt_logprobs, {});
    }
  }
  if (result.tokens.empty()) return;
  if (sequence.num_ops_in_flight == 0) sequence.num_kept_drafts = result.num_drafts;
  EmitTokens(sequence, result);
}

void Scheduler::EmitTokens(Sequence& sequence, const SequenceResult& result) {
  const std::vector<int32_t>& stops = sequence.sampling->stop_token_ids;
  std::optional<EndReason> end;
  size_t count = 0;
  while (count < result.tokens.size() && !end) {
    const int32_t token = result.tokens[count++];
    sequence.ids.push_back(token);
    if (std::find(stops.begin(), stops.end(), token) != stops.end()) {
      end = EndReason::kStopToken;
    } else if (sequence.num_remaining() == 0) {
      end = EndReason::kLength;
    }
  }
  SequenceEvent& event = AddEvent(sequence, SequenceEvent::Kind::kTokens);
  const auto kept = static_cast<std::ptrdiff_t>(count);
  event.tokens.assign(result.tokens.begin(), result.tokens.begin() + kept);
  if (!result.logprobs.empty()) {
    event.logprobs.assign(result.logprobs.begin(), result.logprobs.begin() + kept);
  }
  counters_.num_generated += count;
  counters_.num_dropped += result.tokens.size() - count;
  if (end) EndSequence(sequence, *end);
}

// ---- Ends --------------------------------------------------------------------------------------

SequenceEvent& Scheduler::AddEvent(const Sequence& sequence, SequenceEvent::Kind kind) {
  SequenceEvent& event = events_.emplace_back();
  event.sequence_id = sequence.id;
  event.kind = kind;
  return event;
}

std::vector<SequenceEvent> Scheduler::TakeEvents() {
  return std::exchange(events_, {});
}

void Scheduler::ResetSlotState(Sequence& sequence) {
  sequence.phase = SequencePhase::kWaiting;
  sequence.slot = -1;
  sequence.pages.clear();
  sequence.num_open_ids = 0;
  sequence.num_planned = 0;
  sequence.num_kept_drafts = 0;
  sequence.num_ops_in_flight = 0;
  sequence.max_growth_in_flight = 0;
  sequence.previous_is_round = false;
  sequence.reports_prompt_logprobs = false;
  sequence.prompt_logprobs.clear();
}

void Scheduler::ReleaseSlot(Sequence& sequence) {
  CHECK_GE(sequence.slot, 0);
  slot_owner_[static_cast<size_t>(sequence.slot)] = 0;
  pending_closes_.push_back(sequence.slot);
  blocks_.GiveBack(sequence.pages);
  active_.erase(std::find(active_.begin(), active_.end(), &sequence));
  ResetSlotState(sequence);
}

void Scheduler::Preempt(Sequence& sequence) {
  ReleaseSlot(sequence);
  ++sequence.num_preemptions;
  ++counters_.num_preemptions;
  queue_.PutBack(sequence.id);
}

void Scheduler::Remove(Sequence& sequence) {
  if (sequence.slot >= 0) {
    ReleaseSlot(sequence);
  } else {
    queue_.Remove(sequence.id);
  }
  sequences_.erase(sequence.id);
}

void Scheduler::Fail(Sequence& sequence, absl::Status error) {
  AddEvent(sequence, SequenceEvent::Kind::kFailed).error = std::move(error);
  Remove(sequence);
}

void Scheduler::EndSequence(Sequence& sequence, EndReason reason) {
  SequenceEvent& event = AddEvent(sequence, SequenceEvent::Kind::kEnded);
  event.end_reason = reason;
  event.stop_token_id = sequence.ids.back();
  event.num_prompt_ids = sequence.num_prompt_ids;
  event.num_emitted = sequence.num_emitted();
  event.num_preemptions = sequence.num_preemptions;
  Remove(sequence);
}

void Scheduler::FailAll(const absl::Status& error) {
  std::vector<Sequence*> all;
  for (const auto& [id, sequence] : sequences_)
    all.push_back(sequence.get());
  std::sort(all.begin(), all.end(),
            [](const Sequence* a, const Sequence* b) { return a->id < b->id; });
  for (Sequence* sequence : all)
    Fail(*sequence, error);
}

// ---- Epochs ------------------------------------------------------------------------------------

void Scheduler::BeginEpoch(const EpochLimits& epoch) {
  CHECK(!in_epoch_);
  epoch_ = epoch;
  in_epoch_ = true;
  blocks_ = KvBlockManager(epoch.num_pages);
  slot_owner_.assign(static_cast<size_t>(epoch.num_slots), 0);
  next_op_id_ = 1;
  std::vector<Sequence*> too_long;
  for (const auto& [id, sequence] : sequences_) {
    sequence->max_drafts = std::min(sequence->max_drafts, epoch.max_drafts);
    const int32_t max_tokens = sequence->max_total_ids - sequence->num_prompt_ids;
    if (!ResolveMaxTokens(config_, epoch, sequence->num_prompt_ids, max_tokens).ok()) {
      too_long.push_back(sequence.get());
    }
  }
  for (Sequence* sequence : too_long) {
    Fail(*sequence, absl::UnavailableError("the workers came back with less memory: this request "
                                           "no longer fits"));
  }
}

void Scheduler::EndEpoch() {
  in_epoch_ = false;
  in_flight_.clear();
  while (!active_.empty()) {
    Sequence& sequence = *active_.back();
    ReleaseSlot(sequence);
    queue_.PutBack(sequence.id);
  }
  pending_closes_.clear();
}

// ---- Views -------------------------------------------------------------------------------------

const Sequence* Scheduler::Find(SequenceId id) const {
  const auto it = sequences_.find(id);
  return it == sequences_.end() ? nullptr : it->second.get();
}

int Scheduler::num_prefilling() const {
  return static_cast<int>(std::count_if(active_.begin(), active_.end(), [](const Sequence* s) {
    return s->phase == SequencePhase::kPrefilling;
  }));
}

void Scheduler::CheckInvariants() const {
  CHECK_LE(in_flight_.size(), size_t{limits::kMaxOpsInFlight});
  CHECK_EQ(sequences_.size(), active_.size() + queue_.size());
  int32_t pages = 0;
  for (size_t i = 0; i < active_.size(); ++i) {
    const Sequence& sequence = *active_[i];
    if (i > 0) CHECK_LT(active_[i - 1]->id, sequence.id);
    CHECK(sequence.phase != SequencePhase::kWaiting) << "sequence " << sequence.id;
    CHECK_EQ(slot_owner_.at(static_cast<size_t>(sequence.slot)), sequence.id);
    CHECK_LT(Size(sequence.ids), sequence.max_total_ids);
    pages += Size(sequence.pages);
  }
  CHECK_EQ(pages, blocks_.num_used());
  const auto free_slots = std::count(slot_owner_.begin(), slot_owner_.end(), SequenceId{0});
  CHECK_EQ(slot_owner_.size() - static_cast<size_t>(free_slots), active_.size());
}

}  // namespace twinspark::gateway
