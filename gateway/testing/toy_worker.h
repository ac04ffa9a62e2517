// A worker without a model: runs the scheduler's ops against a toy language whose next token is a
// hash of everything before it. So a test knows what any request must answer, alone or in a crowd,
// with drafts or without, and every mistake of the scheduler (a wrong position, a page given twice,
// a slot used before it is open) is an error here, as it is in a shard worker. Single-threaded.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "gateway/scheduler/scheduler.h"
#include "gateway/scheduler/step_plan.h"

namespace twinspark::gateway {

struct ToyLanguage {
  int vocab_size = 97;
  int draft_error_percent = 30;  // how often a draft is wrong
};

// What the model answers to `prompt`, at most `max_tokens` ids, through the first stop id.
std::vector<int32_t> ToyContinuation(const ToyLanguage& language,
                                     const std::vector<int32_t>& prompt,
                                     const SamplingParams& sampling,
                                     int max_tokens);

// What it reports of prompt[1..]: some number of the prefix and the token, rank and top list too.
std::vector<TokenLogprobs> ToyPromptLogprobs(const std::vector<int32_t>& prompt, int num_top);

class ToyWorker {
 public:
  ToyWorker(const ToyLanguage& language, const EpochLimits& limits);

  // INVALID_ARGUMENT where a shard worker would refuse the op; UNIMPLEMENTED without any effect
  // when `is_unbuilt` says so of a sequence to be opened.
  absl::StatusOr<StepResult> Run(const StepPlan& plan);
  std::function<bool(const OpenSequence&)> is_unbuilt;

  int slots_in_use() const;
  int pages_in_use() const;

 private:
  struct Slot {
    bool open = false;
    std::vector<int32_t> ids;      // known ids; the last one may be the anchor
    std::vector<uint64_t> prefix;  // prefix[i]: hash of ids[0 .. i]
    int32_t num_open_ids = 0;
    int32_t num_prompt_ids = 0;
    bool wants_prompt_logprobs = false;
    int32_t committed = 0;  // positions computed
    std::vector<int32_t> drafts;
    std::vector<int32_t> pages;
    SamplingParams sampling;
    bool draft_allowed = false;
  };

  absl::Status RunControl(const Control& control);
  absl::StatusOr<SequenceResult> RunRound(const RoundSequence& round);
  absl::StatusOr<SequenceResult> RunPrefill(const PrefillRange& range);
  absl::Status CheckRows(const Slot& slot, int slot_idx, int32_t first, int32_t end) const;
  void Append(Slot& slot, int32_t id);
  void MakeDrafts(Slot& slot, bool draft_next, SequenceResult& result);

  const ToyLanguage language_;
  const EpochLimits limits_;
  std::vector<Slot> slots_;
  std::map<uint32_t, std::vector<int32_t>> masks_;
  uint64_t last_op_id_ = 0;
};

}  // namespace twinspark::gateway
