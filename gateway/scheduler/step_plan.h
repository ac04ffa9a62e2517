// One op of the log, as the scheduler decides it, and what a worker answers: plain structs without
// a wire format (gateway/engine turns them into proto). Source: protocol specification 3 and 4.
// Positions are absolute; ids of sequences never travel, they tell the scheduler whose result it
// is.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "gateway/scheduler/sampling_params.h"
#include "gateway/scheduler/token_logprobs.h"

namespace twinspark::gateway {

using SequenceId = uint64_t;  // ascending in the order of arrival; never reused

struct OpenSequence {
  int slot = 0;
  uint64_t request_hash = 0;   // what workers log
  std::vector<int32_t> ids;    // prompt, and what was emitted before a preemption or a recovery
  int32_t num_prompt_ids = 0;  // penalties and min_tokens count from here
  std::shared_ptr<const SamplingParams> sampling;
  bool draft_allowed = false;
  bool wants_prompt_logprobs = false;
};

struct PageMapping {
  int32_t logical_page = 0;
  int32_t physical_page = 0;
};

struct MapPages {
  int slot = 0;
  std::vector<PageMapping> pages;
};

struct CloseSequence {
  int slot = 0;
};

// Tokens that the sequence in `slot` may draw, kept by workers under mask_id.
struct SetMask {
  uint32_t mask_id = 0;    // > 0
  int32_t vocab_size = 0;  // how many bits the mask has
  std::vector<int32_t> allowed_token_ids;
};

using Control = std::variant<CloseSequence, OpenSequence, SetMask, MapPages>;

// Rows first_position .. first_position + k of one sequence: the anchor and k of its kept drafts.
struct RoundSequence {
  SequenceId sequence_id = 0;
  int slot = 0;
  int32_t first_position = 0;   // meaningless with after_previous
  bool after_previous = false;  // wherever the previous op leaves the slot
  int k = 0;
  bool draft_next = false;
  uint32_t mask_id = 0;  // of every row; 0 = none
};

// Rows [begin, end); when end is the number of ids given at OpenSequence, a token is sampled.
struct PrefillRange {
  SequenceId sequence_id = 0;
  int slot = 0;
  int32_t begin = 0;
  int32_t end = 0;
  bool ends_prompt = false;
  bool draft_next = false;
  uint32_t mask_id = 0;
};

// A bulk chunk, all layers at once.
struct ChunkSlice {
  uint64_t chunk_id = 0;
  int num_layers = 1;
  PrefillRange range;
};

struct StepPlan {
  uint64_t op_id = 0;  // 1, 2, 3, ... within an epoch
  uint32_t deadline_ms = 0;
  double predicted_ms = 0;
  std::vector<Control> controls;  // run first, in order
  std::vector<RoundSequence> round;
  std::vector<PrefillRange> short_prefill;
  std::optional<ChunkSlice> chunk;

  int num_round_rows() const {
    int rows = 0;
    for (const RoundSequence& sequence : round)
      rows += 1 + sequence.k;
    return rows;
  }
  int num_prefill_rows() const {
    int rows = chunk ? chunk->range.end - chunk->range.begin : 0;
    for (const PrefillRange& range : short_prefill)
      rows += range.end - range.begin;
    return rows;
  }
};

struct SequenceResult {
  int slot = 0;
  int num_accepted = 0;         // drafts 1..num_accepted agreed
  std::vector<int32_t> tokens;  // t_0 .. t_m; empty for a prefill that does not end the prompt
  int num_drafts = 0;           // kept by the worker for the next round
  bool non_finite = false;
  std::vector<TokenLogprobs> logprobs;         // one per token, when asked for
  std::vector<TokenLogprobs> prompt_logprobs;  // of the prompt positions of this op
};

struct StepResult {
  uint64_t op_id = 0;
  uint32_t compute_us = 0;            // total time of the op in the worker
  std::vector<SequenceResult> round;  // in the order of the plan's lists
  std::vector<SequenceResult> short_prefill;
  std::optional<SequenceResult> chunk;
};

}  // namespace twinspark::gateway
