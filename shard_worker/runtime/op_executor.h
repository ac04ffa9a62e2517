// Executes ops one after another on the compute thread: controls in order, then the round together
// with the short prefill (one forward), then the chunk. Joins the parts of a long prompt, expands
// masks, and makes the digest that must be equal on all ranks. Lives for one epoch. Not
// thread-safe.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <set>

#include "absl/status/status.h"

#include "shard_worker/runtime/worker_backend.h"
#include "shard_worker/runtime/worker_op.h"

namespace twinspark {

// What a step says all ranks must have alike: residual and shared digest of round with short
// prefill, then of the chunk.
using StepDigests = std::array<uint64_t, 4>;

class OpExecutor {
 public:
  // `vocab_size` and `num_layers` of the model; `backend` is borrowed.
  OpExecutor(WorkerBackend& backend, int vocab_size, int num_layers);

  // Never throws work away silently: the outcome's status says what went wrong first. The digest
  // covers the op's bytes, all token ids of the result and the final residual streams of every row.
  OpOutcome Execute(const WorkerOp& op);

 private:
  // Ids of a slot whose OpenSequence has not come whole yet.
  struct PendingOpen {
    OpenSequencePart first;
  };

  absl::Status NotBuilt(const WorkerOp& op) const;
  absl::Status RunControl(const Control& control);
  absl::Status RunOpen(const OpenSequencePart& part);
  absl::Status RunClose(int slot);
  absl::Status RunSetMask(const SetMaskControl& control);
  absl::Status RunControls(const WorkerOp& op);
  SequenceOutcome Stalled(const RoundSequence& sequence) const;
  SequenceOutcome Take(SequenceResult result);
  absl::Status RunRows(const WorkerOp& op, OpOutcome& outcome, StepDigests& digests);
  absl::Status RunCompute(const WorkerOp& op, OpOutcome& outcome, StepDigests& digests);
  absl::Status CheckPositions(const WorkerOp& op) const;

  WorkerBackend& backend_;
  const int vocab_size_;
  const int num_layers_;
  uint64_t next_op_id_ = 1;
  std::map<int, uint64_t>
      request_hashes_;           // by slot, for the log: the gateway's lines have the same
  std::set<int> stalled_slots_;  // last row not finite, until closed or truncated
  std::map<int, PendingOpen> pending_opens_;  // by slot; at most one per slot
};

// xxHash64 over: op bytes, then per sequence of round, short prefill and chunk its token ids (u32),
// then the residual digests (u64). Little endian.
uint64_t OpDigest(const WorkerOp& op, const OpOutcome& outcome, const StepDigests& digests);

// Alternating run lengths (first: forbidden tokens) as packed bits. INVALID_ARGUMENT when they do
// not add up to the vocabulary.
absl::StatusOr<std::vector<uint8_t>> ExpandMaskRuns(std::span<const uint32_t> runs, int vocab_size);

}  // namespace twinspark
