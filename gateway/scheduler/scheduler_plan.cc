// The parts of NextStep: what the next op does for whom. Order of the file is the order of
// planning.
#include <algorithm>
#include <utility>

#include "common/check.h"
#include "gateway/scheduler/draft_policy.h"
#include "gateway/scheduler/scheduler.h"

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

}  // namespace

std::optional<StepPlan> Scheduler::NextStep(int64_t now_us) {
  if (!in_epoch_ || in_flight_.size() >= limits::kMaxOpsInFlight) return std::nullopt;
  if (!in_flight_.empty() && !config_.run_ahead && pending_closes_.empty()) return std::nullopt;
  if (!in_flight_.empty() && in_flight_.back().may_be_refused) return std::nullopt;

  StepPlan plan;
  OpInFlight op;
  if (in_flight_.empty() || config_.run_ahead) PlanWork(now_us, plan, op);
  if (plan.controls.empty() && plan.round.empty() && plan.short_prefill.empty() && !plan.chunk) {
    if (pending_closes_.empty() || ClosesWait(now_us)) return std::nullopt;
  }
  Seal(plan, std::move(op));
  return plan;
}

bool Scheduler::ClosesWait(int64_t now_us) {
  if (config_.close_wait_us == 0) return false;
  if (close_due_us_ == 0) close_due_us_ = now_us + config_.close_wait_us;
  return now_us < close_due_us_;
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
    const int32_t need = KvBlockManager::PagesFor(sequence.num_ids()) + num_running();
    if (need > blocks_.num_free()) return;
    num_ids += sequence.num_ids();
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
  sequence.num_open_ids = sequence.num_ids();
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
  wanted.reserve(candidates.size());
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
    rows.first_position = sequence.num_ids() - (ahead ? 0 : 1);
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
        int64_t{sequence.num_ids()} + sequence.max_growth_in_flight + depths[i];
    missing[i] = std::max(0, KvBlockManager::PagesFor(positions) - sequence.num_pages());
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
    const int32_t first = sequence.num_pages();
    CHECK(blocks_.Take(missing[i], sequence.pages));
    for (int32_t page = first; page < sequence.num_pages(); ++page) {
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

// ---- Sending -----------------------------------------------------------------------------------

void Scheduler::Seal(StepPlan& plan, OpInFlight op) {
  std::vector<Control> controls;
  for (const int slot : pending_closes_)
    controls.push_back(CloseSequence{slot});
  op.closed = std::exchange(pending_closes_, {});
  close_due_us_ = 0;
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

}  // namespace twinspark::gateway
