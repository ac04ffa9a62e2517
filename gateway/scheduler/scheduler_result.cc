// What the result of an op means for the sequences whose rows it had: tokens, refusals, ends.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "gateway/scheduler/scheduler.h"

namespace twinspark::gateway {

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

}  // namespace twinspark::gateway
