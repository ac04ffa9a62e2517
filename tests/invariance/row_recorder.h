// Runs sequences on a model group and keeps, for every (sequence, position), the bits of the row
// that left the last block. Two ways to compute the same tokens must leave the same rows.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "shard_worker/model/forward_observer.h"
#include "tests/golden/model/model_group.h"

namespace twinspark::invariance {

// Final residual streams of a row, bit patterns of the stored elements widened to f32.
using RowBits = std::vector<uint32_t>;

class RowRecorder : public ForwardObserver {
 public:
  explicit RowRecorder(std::string tensor) : tensor_(std::move(tensor)) {}

  // The (slot, position) of every row of the step that comes next, in plan order.
  void Expect(const StepPlan& plan, const std::map<int, int64_t>& next_position);
  void Tensor(const std::string& name, const ConstTensorView& value) override;
  void Lists(const std::string&, const ConstTensorView&, const int32_t*) override {}
  bool WantsScores() const override { return false; }

  const std::map<std::pair<int, int64_t>, RowBits>& rows() const { return rows_; }

 private:
  const std::string tensor_;
  std::vector<std::pair<int, int64_t>> expected_;
  size_t taken_ = 0;  // rows of this step already seen (a step may be cut into several forwards)
  std::map<std::pair<int, int64_t>, RowBits> rows_;
};

struct GroupOptions {
  int world = 1;
  int threads = 1;
  int num_slots = 4;
  bool f16_copy = false;
};

// What one sequence left behind.
struct Trace {
  std::vector<int32_t> tokens;
  std::map<int64_t, RowBits> rows;  // by position, committed ones
  std::map<int64_t, std::pair<std::vector<int32_t>, std::vector<float>>>
      drafts;  // by anchor position: ids, confidences
};

class Runner {
 public:
  explicit Runner(const GroupOptions& options = {});
  ~Runner();

  const ModelConfig& config() { return group_->model().config(); }
  golden::ModelGroup& group() { return *group_; }

  void Open(int slot,
            const std::vector<int32_t>& ids,
            int64_t num_prompt_ids,
            const SamplingParams& sampling,
            int64_t max_length);
  void Close(int slot);
  void Truncate(int slot, int64_t length);

  // One step; sequence traces grow. Explicit drafts are given in the plan; first positions are
  // filled in here.
  void Step(StepPlan plan);
  // Prefill of all ids of a slot in steps of `chunk` rows.
  void Prefill(int slot, int64_t chunk, bool draft_next = true);
  // Rounds until `count` tokens are out. num_drafts of the model's own drafts each.
  void Generate(int slot, size_t count, int num_drafts);

  Trace& trace(int slot);
  size_t num_ids(int slot) const { return sequences_.at(slot).ids; }

 private:
  struct Sequence {
    size_t ids = 0;
    int64_t next = 0;  // position of the next row
    Trace trace;
  };
  std::unique_ptr<golden::ModelGroup> group_;
  std::unique_ptr<RowRecorder> recorder_;
  std::unique_ptr<RowRecorder> ignored_;
  std::map<int, Sequence> sequences_;
};

// Prompt ids of a case of the demo model's golden data, by name.
std::vector<int32_t> DemoPrompt(const std::string& case_name);

}  // namespace twinspark::invariance
