// Decides every op: which sequences get a slot, which rows run, how many drafts are verified, which
// pages are mapped, who is closed. Continuous batching with chunked prefill; pages are mapped as a
// sequence grows and the youngest sequence gives way when they run short (it is opened again later
// with prompt + emitted, which yields the same tokens). Source: protocol specification 3 and 9,
// dspark specification 2.4 and 4.4.
//
// Pure: no I/O, no clock (time is an argument), no threads. Owned and called by EngineLoop on the
// engine thread: Add / Cancel > NextStep > (the workers run the op) > Apply > TakeEvents.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "common/limits.h"
#include "gateway/scheduler/admission_queue.h"
#include "gateway/scheduler/kv_block_manager.h"
#include "gateway/scheduler/sequence.h"
#include "gateway/scheduler/step_cost.h"
#include "gateway/scheduler/step_plan.h"

namespace twinspark::gateway {

// The server's choices; they outlive epochs.
struct SchedulerConfig {
  size_t max_queue = limits::kMaxQueuedRequests;
  int32_t max_output_default = 32768;
  int num_drafts = 3;
  bool run_ahead = true;  // send op n + 1 before the result of op n, where that is safe
  double chunk_target_ms = limits::kChunkTargetMs;  // a bulk chunk with nobody decoding
  double busy_chunk_target_ms = 100;                // beside decoding sequences
  double decode_share = 0.5;  // of the time, while both decoding and bulk prefill want it
  // An op that only closes sequences waits so long for company: it costs every process as much as a
  // round, and nobody waits for it.
  int64_t close_wait_us = 0;
};

// What the workers of one epoch granted.
struct EpochLimits {
  int num_slots = 0;
  int32_t num_pages = 0;
  int max_round_rows = limits::kMaxRoundRows;
  int max_short_prefill_rows = limits::kMaxShortPrefillRows;
  int max_chunk_rows = limits::kMaxChunkRows;
  int32_t max_context = 0;
  int max_drafts = 0;      // of the model; 0: it has no drafter
  int num_layers = 1;      // of the model
  int32_t vocab_size = 0;  // of the model; 0: not known
};

enum class EndReason : uint8_t {
  kStopToken,
  kLength,
  kFinished,   // the caller had enough: a stop string matched
  kCancelled,  // the client left
};

struct SequenceEvent {
  enum class Kind : uint8_t { kAdmitted, kPromptLogprobs, kTokens, kEnded, kFailed };
  SequenceId sequence_id = 0;
  Kind kind = Kind::kTokens;
  std::vector<int32_t> tokens;
  std::vector<TokenLogprobs> logprobs;
  EndReason end_reason = EndReason::kLength;
  int32_t stop_token_id = 0;    // kEnded by kStopToken
  int32_t num_prompt_ids = 0;   // kEnded
  int32_t num_emitted = 0;      // kEnded
  int32_t num_preemptions = 0;  // kEnded
  absl::Status error;           // kFailed
};

struct SchedulerCounters {
  uint64_t num_ops = 0;
  uint64_t num_rounds = 0;        // ops with a round
  uint64_t num_run_ahead = 0;     // ops sent while another was in flight
  uint64_t num_draft_rounds = 0;  // (sequence, round) pairs with k > 0
  uint64_t num_drafted = 0;       // drafts verified
  uint64_t num_accepted = 0;
  uint64_t accepted_at[limits::kMaxDrafts] = {};
  uint64_t num_preemptions = 0;
  uint64_t num_prefill_rows = 0;
  uint64_t num_generated = 0;  // tokens emitted
  uint64_t num_dropped = 0;    // tokens computed and not emitted: surplus of run-ahead and of stops
};

class Scheduler {
 public:
  explicit Scheduler(const SchedulerConfig& config);

  // Output length of a request: `max_tokens`, or when it is 0 what fits, at most the default.
  // INVALID_ARGUMENT with need and have when the request can never run within `epoch`.
  static absl::StatusOr<int32_t> ResolveMaxTokens(const SchedulerConfig& config,
                                                  const EpochLimits& epoch,
                                                  int32_t num_prompt_ids,
                                                  int32_t max_tokens);

  // Queues a sequence; ids must ascend. RESOURCE_EXHAUSTED when the queue is full; errors of
  // ResolveMaxTokens.
  absl::Status Add(SequenceId id, SequenceSpec spec, int64_t now_us);

  // Ends a sequence, if it is still there: an event now, its slot and pages free in the next op.
  void End(SequenceId id, EndReason reason);

  // The next op, if one can be sent now. Call again after Add, End and Apply until it has none, and
  // at close_due_us().
  std::optional<StepPlan> NextStep(int64_t now_us);

  // When closes that wait for company will have waited long enough; 0: none wait.
  int64_t close_due_us() const { return close_due_us_; }

  // The result of the oldest op in flight. An error means that it does not answer that op: the
  // workers are wrong, end the epoch.
  absl::Status Apply(const StepResult& result);

  // Every rank refused the oldest op in flight by name before it had any effect (UNIMPLEMENTED).
  // Whoever was opened in it alone fails with `refusal`; several are opened one by one later;
  // everything else of the op is done again. An error when nobody can be blamed, or when an op was
  // sent that counts on the refused one: end the epoch.
  absl::Status ApplyRefusal(uint64_t op_id, const absl::Status& refusal);

  // Events since the last call, in order.
  std::vector<SequenceEvent> TakeEvents();

  // Workers are ready: every sequence in the queue may run. Those that no longer fit fail.
  void BeginEpoch(const EpochLimits& epoch);
  // Workers are gone: ops in flight are forgotten, sequences with a slot wait again.
  void EndEpoch();
  // Fails every sequence.
  void FailAll(const absl::Status& error);

  // A measured time of the workers' cost table.
  void PresetCost(bool is_prefill, int rows, double ms) { cost_.Preset(is_prefill, rows, ms); }

  const EpochLimits& epoch_limits() const { return epoch_; }
  const SchedulerCounters& counters() const { return counters_; }
  const Sequence* Find(SequenceId id) const;
  int num_running() const { return static_cast<int>(active_.size()); }
  int num_prefilling() const;
  int num_waiting() const { return static_cast<int>(queue_.size()); }
  int num_ops_in_flight() const { return static_cast<int>(in_flight_.size()); }
  int32_t pages_used() const { return blocks_.num_used(); }
  bool empty() const { return sequences_.empty() && pending_closes_.empty(); }

  // For tests: CHECKs that slots, pages, queue and phases agree with each other.
  void CheckInvariants() const;

 private:
  // Part of an op in flight: whose rows these are and what they can add.
  struct RowsInFlight {
    SequenceId sequence_id = 0;
    uint32_t incarnation = 0;
    int growth = 0;  // most tokens it may emit
    int k = 0;
    int num_prompt_logprobs = 0;  // that the result must have
  };
  // An OpenSequence in an op in flight.
  struct OpenInFlight {
    SequenceId sequence_id = 0;
    uint32_t incarnation = 0;
    int slot = -1;
  };
  struct OpInFlight {
    uint64_t op_id = 0;
    double predicted_ms = 0;
    int round_rows = 0;
    int prefill_rows = 0;
    std::vector<RowsInFlight> round;
    std::vector<RowsInFlight> short_prefill;
    std::optional<RowsInFlight> chunk;
    std::vector<OpenInFlight> opened;
    std::vector<int> closed;  // slots
    bool may_be_refused =
        false;  // something of it is not in every build: nothing is sent behind it
    bool has_prompt_logprobs = false;
  };

  // Parts of NextStep, in its order.
  bool ClosesWait(int64_t now_us);
  void PlanWork(int64_t now_us, StepPlan& plan, OpInFlight& op);
  bool MayRunAhead(const Sequence& sequence) const;
  bool MapRoundPages(std::vector<Sequence*>& candidates,
                     const std::vector<int>& depths,
                     StepPlan& plan);
  bool PlanRound(StepPlan& plan, OpInFlight& op);
  void Admit(int64_t now_us, StepPlan& plan, OpInFlight& op);
  void PlanShortPrefill(StepPlan& plan, OpInFlight& op);
  void PlanChunk(StepPlan& plan, OpInFlight& op);
  bool ChunkHasTurn();
  PrefillRange PlanRange(Sequence& sequence, int32_t rows, RowsInFlight& rows_in_flight);
  void Seal(StepPlan& plan, OpInFlight op);

  void Open(Sequence& sequence, int slot, int64_t now_us, StepPlan& plan, OpInFlight& op);
  void Preempt(Sequence& sequence);
  void ReleaseSlot(Sequence& sequence);
  void ResetSlotState(Sequence& sequence);
  void Remove(Sequence& sequence);
  void Fail(Sequence& sequence, absl::Status error);
  void EndSequence(Sequence& sequence, EndReason reason);

  // Parts of Apply and ApplyRefusal.
  void WaitAgain(const RowsInFlight& rows);
  void TakeBackOpen(const OpenInFlight& open, bool is_to_blame, const absl::Status& refusal);
  absl::Status CheckResult(const OpInFlight& op, const StepResult& result) const;
  void ApplyRows(const RowsInFlight& rows, const SequenceResult& result);
  void ApplyDraftCounts(const RowsInFlight& rows, const SequenceResult& result);
  void EmitTokens(Sequence& sequence, const SequenceResult& result);

  bool IsLong(const Sequence& sequence) const;
  bool ChunkInFlight() const;
  SequenceEvent& AddEvent(const Sequence& sequence, SequenceEvent::Kind kind);

  const SchedulerConfig config_;
  EpochLimits epoch_;
  bool in_epoch_ = false;
  StepCost cost_;
  AdmissionQueue queue_;
  KvBlockManager blocks_;
  absl::flat_hash_map<SequenceId, std::unique_ptr<Sequence>> sequences_;
  std::vector<Sequence*> active_;       // with a slot, in order of arrival
  std::vector<SequenceId> slot_owner_;  // 0 = free
  std::vector<int> pending_closes_;     // slots whose CloseSequence goes into the next op
  int64_t close_due_us_ = 0;
  std::deque<OpInFlight> in_flight_;  // at most limits::kMaxOpsInFlight
  std::vector<SequenceEvent> events_;
  SchedulerCounters counters_;
  SequenceId last_sequence_id_ = 0;
  uint64_t next_op_id_ = 1;
  uint64_t next_chunk_id_ = 1;
  SequenceId last_served_ = 0;  // where the next round begins when sequences take turns
  double prefill_debt_ms_ = 0;  // > 0: bulk prefill has waited longer than its share
};

}  // namespace twinspark::gateway
