// See op_executor.h.
#include "shard_worker/runtime/op_executor.h"

#include <chrono>
#include <string>
#include <string_view>
#include <utility>

#include <xxhash.h>

#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "common/ids.h"
#include "common/limits.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace twinspark {
namespace {

int64_t NowUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void AddTimings(const StepTimings& step, OpTimings& op) {
  op.engram_wait_us += step.engram_wait_us;
  op.compute_us += step.forward_us;
  op.collectives_us += step.collectives_us;
  op.sample_us += step.sample_us;
  op.draft_us += step.draft_us;
}

void HashTokens(const SequenceOutcome& sequence, XXH64_state_t* state) {
  const std::vector<int32_t>& tokens = sequence.result.tokens;
  XXH64_update(state, tokens.data(), tokens.size() * sizeof(int32_t));
}

}  // namespace

uint64_t OpDigest(const WorkerOp& op, const OpOutcome& outcome, const StepDigests& digests) {
  XXH64_state_t* state = XXH64_createState();
  CHECK(state != nullptr);
  XXH64_reset(state, 0);
  XXH64_update(state, op.bytes.data(), op.bytes.size());
  for (const SequenceOutcome& sequence : outcome.round)
    HashTokens(sequence, state);
  for (const SequenceOutcome& sequence : outcome.short_prefill)
    HashTokens(sequence, state);
  if (outcome.chunk_slice.has_value()) HashTokens(*outcome.chunk_slice, state);
  XXH64_update(state, digests.data(), sizeof(digests));
  const uint64_t digest = XXH64_digest(state);
  XXH64_freeState(state);
  return digest;
}

absl::StatusOr<std::vector<uint8_t>> ExpandMaskRuns(std::span<const uint32_t> runs,
                                                    int vocab_size) {
  std::vector<uint8_t> bits((static_cast<size_t>(vocab_size) + 7) / 8);
  uint64_t token = 0;
  bool allowed = false;
  for (const uint32_t run : runs) {
    if (token + run > static_cast<uint64_t>(vocab_size)) break;
    for (uint64_t end = token + run; token < end; ++token) {
      if (allowed) bits[token / 8] = static_cast<uint8_t>(bits[token / 8] | 1u << (token % 8));
    }
    allowed = !allowed;
  }
  uint64_t total = 0;
  for (const uint32_t run : runs)
    total += run;
  if (total != static_cast<uint64_t>(vocab_size)) {
    return absl::InvalidArgumentError(
        absl::StrCat("SetMask: runs add up to ", total, ", the vocabulary has ", vocab_size));
  }
  return bits;
}

OpExecutor::OpExecutor(WorkerBackend& backend, int vocab_size, int num_layers)
    : backend_(backend), vocab_size_(vocab_size), num_layers_(num_layers) {}

OpOutcome OpExecutor::Execute(const WorkerOp& op) {
  OpOutcome outcome;
  outcome.op_id = op.op_id;
  StepDigests digests{};
  const int64_t start_us = NowUs();
  outcome.timings.queue_us = start_us - op.received_us;
  if (!op.refused.ok() && !absl::IsUnimplemented(op.refused)) {
    outcome.status = op.refused;
  } else if (op.op_id != next_op_id_) {
    outcome.status = absl::InvalidArgumentError(
        absl::StrCat("op_id is ", op.op_id, ", the log is at ", next_op_id_));
  } else {
    ++next_op_id_;
    outcome.status = NotBuilt(op);
    if (outcome.status.ok()) outcome.status = RunControls(op);
    if (outcome.status.ok()) outcome.status = RunCompute(op, outcome, digests);
  }
  outcome.digest = OpDigest(op, outcome, digests);
  outcome.timings.total_us = NowUs() - start_us;
  return outcome;
}

// What this build cannot do, said before any effect of the op.
absl::Status OpExecutor::NotBuilt(const WorkerOp& op) const {
  if (!op.refused.ok() || !op.chunk_slice.has_value()) return op.refused;
  const ChunkSliceWork& slice = *op.chunk_slice;
  if (slice.first_layer == 0 && slice.end_layer >= num_layers_) return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("ChunkSlice of layers [", slice.first_layer, ", ", slice.end_layer,
                   "): this build runs whole chunks, [0, ", num_layers_, ")"));
}

absl::Status OpExecutor::RunControls(const WorkerOp& op) {
  for (const Control& control : op.controls)
    RETURN_IF_ERROR(RunControl(control));
  return absl::OkStatus();
}

absl::Status OpExecutor::RunControl(const Control& control) {
  if (const auto* open = std::get_if<OpenSequencePart>(&control)) return RunOpen(*open);
  if (const auto* sampling = std::get_if<SetSamplingControl>(&control)) {
    return backend_.SetSampling(sampling->slot, sampling->sampling);
  }
  if (const auto* map = std::get_if<MapPagesControl>(&control)) {
    return backend_.MapPages(map->slot, map->pages);
  }
  if (const auto* truncate = std::get_if<TruncateControl>(&control)) {
    stalled_slots_.erase(truncate->slot);
    return backend_.Truncate(truncate->slot, truncate->length);
  }
  if (const auto* close = std::get_if<CloseSequenceControl>(&control)) {
    return RunClose(close->slot);
  }
  if (const auto* mask = std::get_if<SetMaskControl>(&control)) return RunSetMask(*mask);
  return absl::OkStatus();  // Ping, Fence
}

absl::Status OpExecutor::RunOpen(const OpenSequencePart& part) {
  const int slot = part.open.slot;
  auto pending = pending_opens_.find(slot);
  if (part.ids_offset == 0) {
    if (pending != pending_opens_.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "OpenSequence: slot ", slot, " is still waiting for parts of another prompt"));
    }
    request_hashes_[slot] = part.request_id_hash;
    LOG_INFO << "sequence opened hash=" << Hex16(part.request_id_hash) << " slot=" << slot
             << " op=" << next_op_id_ - 1 << " ids=" << part.total_ids;
    if (static_cast<int64_t>(part.open.ids.size()) == part.total_ids) {
      return backend_.Open(part.open);
    }
    pending_opens_[slot].first = part;
    return absl::OkStatus();
  }
  if (pending == pending_opens_.end()) {
    return absl::InvalidArgumentError(absl::StrCat("OpenSequence: part at ", part.ids_offset,
                                                   " of slot ", slot, " without a first part"));
  }
  OpenSequence& open = pending->second.first.open;
  if (static_cast<int64_t>(open.ids.size()) != part.ids_offset) {
    return absl::InvalidArgumentError(absl::StrCat("OpenSequence: part of slot ", slot,
                                                   " begins at ", part.ids_offset, ", expected ",
                                                   open.ids.size()));
  }
  open.ids.insert(open.ids.end(), part.open.ids.begin(), part.open.ids.end());
  const int64_t total = pending->second.first.total_ids;
  if (static_cast<int64_t>(open.ids.size()) > total) {
    return absl::InvalidArgumentError(
        absl::StrCat("OpenSequence: slot ", slot, " got ", open.ids.size(), " ids of ", total));
  }
  if (static_cast<int64_t>(open.ids.size()) < total) return absl::OkStatus();
  const absl::Status opened = backend_.Open(open);
  pending_opens_.erase(pending);
  return opened;
}

absl::Status OpExecutor::RunClose(int slot) {
  const int64_t committed = backend_.CommittedLength(slot);
  if (pending_opens_.erase(slot) == 0) RETURN_IF_ERROR(backend_.Close(slot));
  LOG_INFO << "sequence closed hash=" << Hex16(request_hashes_[slot]) << " slot=" << slot
           << " op=" << next_op_id_ - 1 << " committed=" << committed;
  request_hashes_.erase(slot);
  stalled_slots_.erase(slot);
  return absl::OkStatus();
}

absl::Status OpExecutor::RunSetMask(const SetMaskControl& control) {
  if (!control.runs.empty()) {
    ASSIGN_OR_RETURN(const std::vector<uint8_t> bits, ExpandMaskRuns(control.runs, vocab_size_));
    return backend_.SetMask(control.mask_id, bits);
  }
  if (control.bits.size() != (static_cast<size_t>(vocab_size_) + 7) / 8) {
    return absl::InvalidArgumentError(
        absl::StrCat("SetMask: mask ", control.mask_id, " has ", control.bits.size(),
                     " bytes, the vocabulary needs ", (vocab_size_ + 7) / 8));
  }
  return backend_.SetMask(control.mask_id, control.bits);
}

// What a gateway bug would look like: rows that do not continue where the slot stands.
absl::Status OpExecutor::CheckPositions(const WorkerOp& op) const {
  auto check = [this](std::string_view what, int slot, int64_t first) -> absl::Status {
    const int64_t committed = backend_.CommittedLength(slot);
    if (committed < 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(std::string(what), ": slot ", slot, " is not open"));
    }
    if (first != committed) {
      return absl::InvalidArgumentError(absl::StrCat(std::string(what), ": slot ", slot,
                                                     " begins at position ", first,
                                                     ", its committed length is ", committed));
    }
    return absl::OkStatus();
  };
  for (const RoundSequence& sequence : op.round) {
    const int64_t first =
        sequence.after_previous ? backend_.CommittedLength(sequence.slot) : sequence.first_position;
    RETURN_IF_ERROR(check("Round", sequence.slot, first));
  }
  for (const PrefillRange& range : op.short_prefill) {
    RETURN_IF_ERROR(check("ShortPrefill", range.slot, range.begin));
  }
  if (op.chunk_slice.has_value()) {
    RETURN_IF_ERROR(check("ChunkSlice", op.chunk_slice->range.slot, op.chunk_slice->range.begin));
    if (op.chunk_slice->end_layer > num_layers_) {
      return absl::InvalidArgumentError(absl::StrCat("ChunkSlice: end_layer is ",
                                                     op.chunk_slice->end_layer, ", the model has ",
                                                     num_layers_, " layers"));
    }
  }
  return absl::OkStatus();
}

// A slot whose last row was not finite has no next token to go on from. A round that was sent ahead
// of that result is answered, not run: only that request fails.
SequenceOutcome OpExecutor::Stalled(const RoundSequence& sequence) const {
  SequenceOutcome outcome;
  outcome.result.slot = sequence.slot;
  outcome.result.non_finite = true;
  outcome.committed_length = backend_.CommittedLength(sequence.slot);
  return outcome;
}

SequenceOutcome OpExecutor::Take(SequenceResult result) {
  SequenceOutcome outcome{std::move(result), 0};
  outcome.committed_length = backend_.CommittedLength(outcome.result.slot);
  if (outcome.result.non_finite) stalled_slots_.insert(outcome.result.slot);
  return outcome;
}

absl::Status OpExecutor::RunRows(const WorkerOp& op, OpOutcome& outcome, StepDigests& digests) {
  StepPlan plan;
  for (const RoundSequence& sequence : op.round) {
    if (stalled_slots_.contains(sequence.slot)) {
      outcome.round.push_back(Stalled(sequence));
      continue;
    }
    outcome.round.emplace_back();
    outcome.timings.rows += 1 + sequence.num_drafts;
    plan.round.push_back(sequence);
  }
  plan.prefill = op.short_prefill;
  if (plan.round.empty() && plan.prefill.empty()) return absl::OkStatus();
  absl::StatusOr<StepResult> ran = backend_.RunStep(plan);
  if (!ran.ok()) {
    outcome.round.clear();  // a failed step has no answers, only its status
    return ran.status();
  }
  StepResult& result = *ran;
  CHECK_EQ(result.sequences.size(), plan.round.size() + plan.prefill.size());
  digests[0] = result.residual_digest;
  digests[1] = result.shared_digest;
  AddTimings(result.timings, outcome.timings);
  size_t next = 0;
  for (size_t i = 0; i < op.round.size(); ++i) {
    if (outcome.round[i].result.non_finite) continue;  // stalled before
    outcome.round[i] = Take(std::move(result.sequences[next++]));
  }
  for (const PrefillRange& range : op.short_prefill) {
    outcome.short_prefill.push_back(Take(std::move(result.sequences[next++])));
    outcome.timings.rows += static_cast<int>(range.end - range.begin);
  }
  return absl::OkStatus();
}

absl::Status OpExecutor::RunCompute(const WorkerOp& op, OpOutcome& outcome, StepDigests& digests) {
  RETURN_IF_ERROR(CheckPositions(op));
  RETURN_IF_ERROR(RunRows(op, outcome, digests));
  if (!op.chunk_slice.has_value()) return absl::OkStatus();
  const PrefillRange& range = op.chunk_slice->range;
  StepPlan plan;
  plan.prefill = {range};
  plan.bulk = true;
  ASSIGN_OR_RETURN(StepResult result, backend_.RunStep(plan));
  CHECK_EQ(result.sequences.size(), size_t{1});
  digests[2] = result.residual_digest;
  digests[3] = result.shared_digest;
  AddTimings(result.timings, outcome.timings);
  outcome.chunk_slice = Take(std::move(result.sequences[0]));
  outcome.timings.rows += static_cast<int>(range.end - range.begin);
  return absl::OkStatus();
}

}  // namespace twinspark
