// Sequences from Add to their end, and epochs. What an op does is decided in scheduler_plan.cc,
// what its result means in scheduler_result.cc.
#include "gateway/scheduler/scheduler.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/check.h"

namespace twinspark::gateway {

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
  const auto num_prompt_ids = static_cast<int32_t>(spec.prompt_ids.size());
  auto max_tokens = ResolveMaxTokens(config_, epoch_, num_prompt_ids, spec.max_tokens);
  if (!max_tokens.ok()) return max_tokens.status();
  if (queue_.full()) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the queue is full: ", queue_.size(), " requests wait"));
  }
  auto sequence = std::make_unique<Sequence>();
  sequence->id = id;
  sequence->request_hash = spec.request_hash;
  sequence->num_prompt_ids = num_prompt_ids;
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
  close_due_us_ = 0;
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
    CHECK_LT(sequence.num_ids(), sequence.max_total_ids);
    pages += sequence.num_pages();
  }
  CHECK_EQ(pages, blocks_.num_used());
  const auto free_slots = std::count(slot_owner_.begin(), slot_owner_.end(), SequenceId{0});
  CHECK_EQ(slot_owner_.size() - static_cast<size_t>(free_slots), active_.size());
}

}  // namespace twinspark::gateway
