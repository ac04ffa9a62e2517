// What a Model holds and does (model.h): its state with the checks of what callers pass in
// (model.cc) and a step (model_step.cc). For these two files only; one thread at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include <xxhash.h>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "common/model_config.h"
#include "kernels/ops/ops.h"
#include "shard_worker/model/forward.h"
#include "shard_worker/model/kv_cache.h"
#include "shard_worker/model/model.h"
#include "shard_worker/model/sequence_state.h"
#include "shard_worker/model/step.h"
#include "shard_worker/model/weights.h"

namespace twinspark {

class Model::Impl {
 public:
  Impl(ModelConfig config, ModelOptions options, ThreadPool& pool)
      : config_(std::move(config)), options_(std::move(options)), pool_(pool) {}

  ModelConfig config_;
  ModelOptions options_;
  ThreadPool& pool_;
  ModelDigests digests_;
  std::vector<MemoryPlanEntry> memory_plan_;
  ModelWeights weights_;
  std::unique_ptr<KvCache> cache_;
  std::unique_ptr<Forward> forward_;
  std::vector<SequenceState> slots_;
  absl::flat_hash_map<int32_t, std::vector<uint8_t>> masks_;
  bool in_epoch_ = false;
  bool observe_all_logits_ = false;  // an observer wants the logits of every row

  void Build();
  const OpTable& Ops() const {
    return options_.reference.ops != nullptr ? *options_.reference.ops : CpuOps();
  }
  absl::StatusOr<SequenceState*> Slot(int slot);
  absl::Status CheckPages(const SequenceState& sequence, int slot, int64_t end) const;
  absl::Status CheckIds(std::span<const int32_t> ids) const;
  absl::StatusOr<StepResult> RunStep(const StepPlan& plan);

 private:
  // One sequence's part of a step while it is being prepared and run.
  struct Work {
    SequenceResult* result = nullptr;
    SequenceState* sequence = nullptr;
    int slot = 0;
    bool draft_next = false;
    std::vector<int32_t> row_ids;       // round: anchor and drafts
    std::span<const int32_t> mask_ids;  // per logits row
    int32_t prefill_mask = -1;
    int64_t begin = 0;
    int64_t end = 0;
    bool is_round = false;
  };

  absl::Status PlanRound(const RoundSequence& round, Work& work);
  absl::Status PlanPrefill(const PrefillRange& range, Work& work);
  absl::Status PlanStep(const StepPlan& plan,
                        std::span<SequenceResult> results,
                        std::span<Work> works);
  Segment MakeSegment(const Work& work, int64_t at, int64_t rows) const;
  absl::Status RunWorks(std::span<Work> works,
                        RowClass row_class,
                        XXH64_state_t* digest,
                        StepResult& result);
  absl::Status RunBatch(std::span<Work*> works,
                        std::span<Segment> segments,
                        RowClass row_class,
                        XXH64_state_t* digest,
                        StepResult& result);
  absl::Status Choose(std::span<Work*> works, std::span<const Segment> segments);
  void RunChoice(const ConstTensorView& logits, std::span<const ChoiceRow> rows);
  TokenLogprobs LogprobsOfRow(size_t row, int32_t num_top) const;
  absl::Status PromptLogprobs(std::span<Work*> works, std::span<const Segment> segments);
  void AddPromptLogprobs(Work& work, const ConstTensorView& logits, int64_t first_position);
  void Accept(Work& work, std::span<const int32_t> tokens, size_t first_row);
  absl::Status MakeDrafts(std::span<Work> works);
  void HintNextRound(std::span<const Work> works,
                     Segment (*rows_of)(int slot, const SequenceState& sequence));
  absl::StatusOr<const uint8_t*> Mask(int32_t mask_id) const;

  std::vector<int32_t> chosen_;
  std::vector<uint8_t> non_finite_;
  std::vector<int32_t> logprob_ids_;
  std::vector<float> logprobs_;
  std::vector<int32_t> logprob_ranks_;
  int64_t logprob_stride_ = 0;
};

}  // namespace twinspark
