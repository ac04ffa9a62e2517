// All ranks of a model in one process: golden programs and tests of the model. Every call goes to
// all ranks, each on a thread of its own; their results must agree bit for bit.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "kernels/thread_pool.h"
#include "shard_worker/model/model.h"
#include "shard_worker/parallel/communicator.h"
#include "tests/golden/model/memory_row_source.h"

namespace twinspark::golden {

class ModelGroup {
 public:
  // `options` without rank; options.world ranks with `threads_per_rank` threads each.
  static absl::StatusOr<std::unique_ptr<ModelGroup>> Load(const std::string& dir,
                                                          const ModelOptions& options,
                                                          int threads_per_rank);

  int world() const { return static_cast<int>(ranks_.size()); }
  Model& model(int rank = 0) { return *ranks_[static_cast<size_t>(rank)].model; }
  MemoryRowSource& rows(int rank = 0) { return *ranks_[static_cast<size_t>(rank)].rows; }

  // Runs fn(rank, model) on all ranks at once; the first error, lowest rank first.
  absl::Status OnAllRanks(const std::function<absl::Status(int, Model&)>& fn);

  absl::Status BeginEpoch();
  // Opens a slot and maps pages [slot * pages_per_slot, ...) for up to `max_length` positions.
  absl::Status Open(const OpenSequence& open, int64_t max_length);
  absl::Status Close(int slot);
  absl::StatusOr<StepResult> RunStep(const StepPlan& plan);
  // Prefill of positions [begin, end) in steps of `chunk` rows; the result of the last step.
  absl::StatusOr<SequenceResult> Prefill(
      int slot, int64_t begin, int64_t end, int64_t chunk, bool draft_next);
  absl::StatusOr<SequenceResult> Round(int slot, int num_drafts, bool draft_next);

 private:
  struct Rank {
    std::unique_ptr<ThreadPool> pool;
    std::unique_ptr<Model> model;
    std::unique_ptr<MemoryRowSource> rows;
    std::unique_ptr<Communicator> communicator;
  };
  std::vector<Rank> ranks_;
};

}  // namespace twinspark::golden
