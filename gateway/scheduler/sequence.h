// One request inside the scheduler, from the queue to its last token. Owned by Scheduler; nobody
// else changes it. `ids` (prompt and every emitted token) is all that a new epoch or a re-prefill
// needs; everything below "slot" describes what a worker holds and is lost with the slot.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "gateway/scheduler/step_plan.h"

namespace twinspark::gateway {

// What a request asks of the scheduler, checked against the limits by Scheduler::Add.
struct SequenceSpec {
  uint64_t request_hash = 0;
  std::vector<int32_t> prompt_ids;
  SamplingParams sampling;
  int32_t max_tokens = 0;  // 0: what fits, at most SchedulerConfig::max_output_default
  int max_drafts = -1;     // -1: the server's default
  bool run_ahead_allowed = true;
};

enum class SequencePhase : uint8_t {
  kWaiting,     // in the queue: no slot
  kPrefilling,  // has a slot; rows [num_planned, ids.size()) are still to be planned
  kDecoding,    // all ids but the last are, or will be after the ops in flight, computed
};

struct Sequence {
  SequenceId id = 0;
  uint64_t request_hash = 0;
  std::vector<int32_t> ids;
  int32_t num_prompt_ids = 0;
  int32_t max_total_ids = 0;  // prompt + output; the last one is never fed back
  int max_drafts = 0;
  bool run_ahead_allowed = true;
  std::shared_ptr<const SamplingParams> sampling;
  int64_t enqueue_us = 0;
  int64_t admit_us = 0;  // first admission; 0 = not yet
  int32_t num_preemptions = 0;
  bool opens_alone = false;  // an op that opened it together with others was refused
  bool prompt_logprobs_sent = false;
  std::vector<TokenLogprobs> prompt_logprobs;  // collected chunk by chunk

  SequencePhase phase = SequencePhase::kWaiting;
  int slot = -1;
  uint32_t incarnation = 0;    // counts openings: results of an earlier one are dropped
  std::vector<int32_t> pages;  // physical, by logical page
  int32_t num_open_ids = 0;    // ids given at OpenSequence: where its prefill ends
  int32_t num_planned = 0;     // of them: rows in ops sent so far
  int num_kept_drafts = 0;     // that the worker holds, or will hold after the ops in flight
  int num_ops_in_flight = 0;
  // Most tokens that the ops in flight can add to `ids`.
  int max_growth_in_flight = 0;
  bool reports_prompt_logprobs = false;  // it was opened with the wish
  bool previous_is_round = false;        // the op in flight is a Round: its length is not known yet

  int32_t num_ids() const { return static_cast<int32_t>(ids.size()); }
  int32_t num_pages() const { return static_cast<int32_t>(pages.size()); }
  int32_t num_emitted() const { return num_ids() - num_prompt_ids; }
  int32_t num_remaining() const { return max_total_ids - num_ids(); }
};

}  // namespace twinspark::gateway
