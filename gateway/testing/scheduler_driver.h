// Drives a Scheduler and a ToyWorker together, as EngineLoop drives the scheduler and the shard
// workers, with ops and results kept apart so that a test decides when a result arrives. Collects
// each request's tokens and end. Header-only; single-threaded.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "common/check.h"
#include "gateway/scheduler/scheduler.h"
#include "gateway/testing/toy_worker.h"

namespace twinspark::gateway {

class SchedulerDriver {
 public:
  struct Answer {
    std::vector<int32_t> tokens;
    std::vector<TokenLogprobs> prompt_logprobs;
    int num_admitted = 0;
    int num_ends = 0;
    std::optional<EndReason> end_reason;
    absl::Status error;
    int32_t num_preemptions = 0;
  };

  SchedulerDriver(const SchedulerConfig& config,
                  const ToyLanguage& language,
                  const EpochLimits& limits)
      : scheduler(config), language_(language) {
    BeginEpoch(limits);
  }

  void BeginEpoch(const EpochLimits& limits) {
    worker.emplace(language_, limits);
    worker->is_unbuilt = is_unbuilt;
    scheduler.BeginEpoch(limits);
    Collect();
  }

  void EndEpoch() {
    results_.clear();
    scheduler.EndEpoch();
    Collect();
  }

  // Sends one op if the scheduler has one; the worker runs it at once, its result waits.
  bool Send() {
    std::optional<StepPlan> plan = scheduler.NextStep(now_us);
    Collect();
    if (!plan) return false;
    auto result = worker->Run(*plan);
    if (absl::IsUnimplemented(result.status())) {
      results_.push_back({plan->op_id, result.status()});
      last_plan = *std::move(plan);
      return true;
    }
    CHECK(result.ok()) << "op " << plan->op_id << ": " << result.status().ToString();
    // A round costs 4 ms and 0.5 ms a row, prefill 0.5 ms a row: what the cost model has to learn.
    result->compute_us =
        static_cast<uint32_t>((plan->round.empty() ? 0 : 4000) + 500 * plan->num_round_rows() +
                              500 * plan->num_prefill_rows());
    results_.push_back({plan->op_id, *std::move(result)});
    last_plan = *std::move(plan);
    return true;
  }

  // Hands the oldest waiting result to the scheduler.
  bool Receive() {
    if (results_.empty()) return false;
    const auto [op_id, result] = std::move(results_.front());
    results_.pop_front();
    if (result.ok()) now_us += result->compute_us;
    const absl::Status status =
        result.ok() ? scheduler.Apply(*result) : scheduler.ApplyRefusal(op_id, result.status());
    CHECK(status.ok()) << status.ToString();
    Collect();
    return true;
  }

  void SendAll() {
    while (Send()) {
    }
  }

  // Until every request has ended; CHECKs that this takes at most max_ops ops.
  void RunToEnd(int max_ops = 100000) {
    for (int op = 0; op < max_ops; ++op) {
      SendAll();
      if (!Receive() && scheduler.empty()) return;
    }
    CHECK(false) << "still running after " << max_ops << " ops";
  }

  void Collect() {
    for (SequenceEvent& event : scheduler.TakeEvents()) {
      Answer& answer = answers[event.sequence_id];
      CHECK_EQ(answer.num_ends, 0) << "event after the end of sequence " << event.sequence_id;
      switch (event.kind) {
        case SequenceEvent::Kind::kAdmitted:
          ++answer.num_admitted;
          break;
        case SequenceEvent::Kind::kPromptLogprobs:
          CHECK(answer.tokens.empty() && answer.prompt_logprobs.empty());
          answer.prompt_logprobs = std::move(event.logprobs);
          break;
        case SequenceEvent::Kind::kTokens:
          answer.tokens.insert(answer.tokens.end(), event.tokens.begin(), event.tokens.end());
          break;
        case SequenceEvent::Kind::kEnded:
          ++answer.num_ends;
          answer.end_reason = event.end_reason;
          answer.num_preemptions = event.num_preemptions;
          CHECK_EQ(static_cast<size_t>(event.num_emitted), answer.tokens.size());
          break;
        case SequenceEvent::Kind::kFailed:
          ++answer.num_ends;
          answer.error = event.error;
          break;
      }
    }
  }

  Scheduler scheduler;
  std::optional<ToyWorker> worker;
  std::map<SequenceId, Answer> answers;
  StepPlan last_plan;
  int64_t now_us = 1;
  // What the workers of the next epoch cannot do; null = everything is built.
  std::function<bool(const OpenSequence&)> is_unbuilt;

 private:
  const ToyLanguage language_;
  std::deque<std::pair<uint64_t, absl::StatusOr<StepResult>>> results_;
};

}  // namespace twinspark::gateway
