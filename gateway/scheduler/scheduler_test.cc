// The scheduler's rules, one by one, against ToyWorker (which refuses ops that do not fit). The
// fuzz (scheduler_fuzz.cc) covers their mixtures; here each rule has a case that shows it alone.
#include "gateway/scheduler/scheduler.h"

#include <algorithm>
#include <set>
#include <variant>

#include <gtest/gtest.h>

#include "gateway/testing/scheduler_driver.h"
#include "gateway/testing/toy_worker.h"

namespace twinspark::gateway {
namespace {

EpochLimits Limits() {
  EpochLimits limits;
  limits.num_slots = 16;
  limits.num_pages = 256;
  limits.max_chunk_rows = 2048;
  limits.max_context = 8192;
  limits.max_drafts = 5;
  return limits;
}

SequenceSpec Spec(int length, int max_tokens, uint64_t seed = 1) {
  SequenceSpec spec;
  for (int i = 0; i < length; ++i) {
    spec.prompt_ids.push_back(static_cast<int32_t>((i * 7 + static_cast<int>(seed)) % 97));
  }
  spec.sampling.seed = seed;
  spec.max_tokens = max_tokens;
  return spec;
}

class SchedulerTest : public ::testing::Test {
 protected:
  void Start() { driver_.emplace(config_, language_, limits_); }

  SequenceId Add(const SequenceSpec& spec) {
    const SequenceId id = next_id_++;
    const absl::Status status = driver_->scheduler.Add(id, spec, driver_->now_us);
    EXPECT_TRUE(status.ok()) << status.ToString();
    expected_[id] = ToyContinuation(language_, spec.prompt_ids, spec.sampling, spec.max_tokens);
    return id;
  }

  void ExpectRight(SequenceId id) {
    EXPECT_EQ(driver_->answers[id].tokens, expected_[id]) << id;
    EXPECT_EQ(driver_->answers[id].num_ends, 1) << id;
  }

  SchedulerConfig config_;
  ToyLanguage language_;
  EpochLimits limits_ = Limits();
  std::optional<SchedulerDriver> driver_;
  SequenceId next_id_ = 1;
  std::map<SequenceId, std::vector<int32_t>> expected_;
};

TEST_F(SchedulerTest, FirstOpOpensMapsAndPrefills) {
  Start();
  Add(Spec(150, 10));
  ASSERT_TRUE(driver_->Send());
  const StepPlan& plan = driver_->last_plan;
  EXPECT_EQ(plan.op_id, 1u);
  ASSERT_EQ(plan.controls.size(), 2u);
  EXPECT_TRUE(std::holds_alternative<OpenSequence>(plan.controls[0]));
  EXPECT_EQ(std::get<MapPages>(plan.controls[1]).pages.size(), 3u);
  ASSERT_EQ(plan.short_prefill.size(), 1u);
  EXPECT_TRUE(plan.short_prefill[0].ends_prompt);
  EXPECT_TRUE(plan.short_prefill[0].draft_next);
  EXPECT_GE(plan.deadline_ms, 2000u);
}

// The next request takes the close of the last one along; without one it is sent when it is due.
TEST_F(SchedulerTest, ClosesWaitForCompany) {
  config_.close_wait_us = 5000;
  Start();
  const SequenceId first = Add(Spec(10, 1));
  ASSERT_TRUE(driver_->Send());
  ASSERT_TRUE(driver_->Receive());
  ExpectRight(first);
  EXPECT_FALSE(driver_->Send());
  EXPECT_EQ(driver_->scheduler.close_due_us(), driver_->now_us + 5000);
  EXPECT_EQ(driver_->scheduler.pages_used(), 0) << "free for others at once";
  driver_->now_us += 4999;
  EXPECT_FALSE(driver_->Send());
  Add(Spec(10, 1));
  ASSERT_TRUE(driver_->Send());
  ASSERT_GE(driver_->last_plan.controls.size(), 2u);
  EXPECT_TRUE(std::holds_alternative<CloseSequence>(driver_->last_plan.controls[0]));
  EXPECT_TRUE(std::holds_alternative<OpenSequence>(driver_->last_plan.controls[1]));
  EXPECT_EQ(driver_->scheduler.close_due_us(), 0);
  ASSERT_TRUE(driver_->Receive());
  EXPECT_FALSE(driver_->Send());
  driver_->now_us += 5000;
  ASSERT_TRUE(driver_->Send());
  ASSERT_EQ(driver_->last_plan.controls.size(), 1u);
  EXPECT_TRUE(std::holds_alternative<CloseSequence>(driver_->last_plan.controls[0]));
  ASSERT_TRUE(driver_->Receive());
  EXPECT_TRUE(driver_->scheduler.empty());
}

TEST_F(SchedulerTest, RunsOneRoundAhead) {
  Start();
  const SequenceId id = Add(Spec(10, 100));
  ASSERT_TRUE(driver_->Send());
  ASSERT_TRUE(driver_->Send());  // its place is known: behind the prompt
  EXPECT_FALSE(driver_->last_plan.round.at(0).after_previous);
  EXPECT_EQ(driver_->last_plan.round.at(0).first_position, 10);
  EXPECT_FALSE(driver_->Send());  // two in flight
  ASSERT_TRUE(driver_->Receive());
  ASSERT_TRUE(driver_->Send());
  EXPECT_TRUE(driver_->last_plan.round.at(0).after_previous);
  driver_->RunToEnd();
  ExpectRight(id);
  EXPECT_GT(driver_->scheduler.counters().num_run_ahead, 5u);
}

TEST_F(SchedulerTest, DoesNotRunAheadNearTheEndOrWithStopStrings) {
  Start();
  const SequenceId near = Add(Spec(10, 5));
  ASSERT_TRUE(driver_->Send());
  EXPECT_FALSE(driver_->Send());  // 5 left, a round may emit 4
  driver_->RunToEnd();
  ExpectRight(near);
  SequenceSpec spec = Spec(10, 100);
  spec.run_ahead_allowed = false;
  const uint64_t before = driver_->scheduler.counters().num_run_ahead;
  const SequenceId id = Add(spec);
  driver_->RunToEnd();
  ExpectRight(id);
  EXPECT_EQ(driver_->scheduler.counters().num_run_ahead, before);
}

TEST_F(SchedulerTest, AnswersDoNotDependOnDrafts) {
  for (int k = 0; k <= 5; ++k) {
    config_.num_drafts = k;
    Start();
    next_id_ = 1;
    const SequenceId id = Add(Spec(33, 200));
    driver_->RunToEnd();
    ExpectRight(id);
    EXPECT_EQ(driver_->scheduler.counters().num_drafted > 0, k > 0);
  }
}

TEST_F(SchedulerTest, RowsOfARoundStayWithinTheBudget) {
  limits_.num_slots = 64;
  Start();
  std::vector<SequenceId> ids;
  for (uint64_t i = 0; i < 60; ++i)
    ids.push_back(Add(Spec(5, 40, i)));
  int widest = 0;
  for (int op = 0; op < 10000 && !driver_->scheduler.empty(); ++op) {
    while (driver_->Send()) {
      EXPECT_LE(driver_->last_plan.num_round_rows(), 48);
      widest = std::max(widest, static_cast<int>(driver_->last_plan.round.size()));
    }
    driver_->Receive();
  }
  EXPECT_EQ(widest, 48);  // k = 0 for all, and they take turns
  for (const SequenceId id : ids)
    ExpectRight(id);
}

TEST_F(SchedulerTest, LongPromptRunsInChunksBesideRounds) {
  Start();
  const SequenceId chat = Add(Spec(10, 2000));
  for (int i = 0; i < 20; ++i) {
    driver_->Send();
    driver_->Receive();
  }
  const SequenceId bulk = Add(Spec(4000, 5));
  int chunks = 0;
  int rounds_between = 0;
  double longest_ms = 0;
  while (driver_->answers[bulk].num_ends == 0) {
    while (driver_->Send()) {
      const StepPlan& plan = driver_->last_plan;
      if (plan.chunk) {
        ++chunks;
        EXPECT_TRUE(plan.round.empty());  // rounds do not wait for it in the same result
        longest_ms = std::max(longest_ms, plan.predicted_ms);
      } else if (chunks > 0) {
        rounds_between += plan.round.empty() ? 0 : 1;
      }
    }
    ASSERT_TRUE(driver_->Receive());
  }
  EXPECT_GE(chunks, 10);
  EXPECT_GT(rounds_between, chunks);
  EXPECT_LE(longest_ms, config_.chunk_target_ms);
  ExpectRight(bulk);
  driver_->RunToEnd();
  ExpectRight(chat);
}

TEST_F(SchedulerTest, ShortPromptDoesNotWaitForALongOne) {
  Start();
  const SequenceId bulk = Add(Spec(8000, 2));
  driver_->Send();
  const SequenceId chat = Add(Spec(20, 2));
  int ops = 0;
  while (driver_->answers[chat].tokens.empty() && ops < 100) {
    driver_->SendAll();
    driver_->Receive();
    ++ops;
  }
  EXPECT_LE(ops, 3);
  EXPECT_TRUE(driver_->answers[bulk].tokens.empty());
  driver_->RunToEnd();
  ExpectRight(bulk);
  ExpectRight(chat);
}

TEST_F(SchedulerTest, CancelFreesSlotAndPagesInTheNextOp) {
  Start();
  const SequenceId id = Add(Spec(3000, 100));
  driver_->Send();
  EXPECT_EQ(driver_->worker->slots_in_use(), 1);
  driver_->scheduler.End(id, EndReason::kCancelled);
  driver_->Collect();
  EXPECT_EQ(driver_->answers[id].end_reason, EndReason::kCancelled);
  ASSERT_TRUE(driver_->Send());  // while the chunk is still in flight
  EXPECT_TRUE(std::holds_alternative<CloseSequence>(driver_->last_plan.controls.at(0)));
  EXPECT_EQ(driver_->worker->slots_in_use(), 0);
  EXPECT_EQ(driver_->worker->pages_in_use(), 0);
  driver_->RunToEnd();
}

TEST_F(SchedulerTest, TheYoungestGivesWayWhenPagesRunShort) {
  limits_.num_pages = 8;
  Start();
  const SequenceId old_one = Add(Spec(100, 250, 1));
  const SequenceId young = Add(Spec(100, 250, 2));
  driver_->RunToEnd();
  ExpectRight(old_one);
  ExpectRight(young);
  EXPECT_EQ(driver_->answers[old_one].num_preemptions, 0);
  EXPECT_GT(driver_->answers[young].num_preemptions, 0);
  EXPECT_EQ(driver_->answers[young].num_admitted, 1);  // said once
}

TEST_F(SchedulerTest, WhatCanNeverFitIsRefusedWithNeedAndHave) {
  limits_.num_pages = 8;
  Start();
  const absl::Status status = driver_->scheduler.Add(1, Spec(500, 100), 0);
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_NE(status.message().find("600"), std::string::npos) << status.ToString();
  EXPECT_NE(status.message().find("513"), std::string::npos) << status.ToString();
  // Without a maximum it gets what fits.
  const auto fits = Scheduler::ResolveMaxTokens(config_, limits_, 500, 0);
  ASSERT_TRUE(fits.ok());
  EXPECT_EQ(*fits, 13);
}

TEST_F(SchedulerTest, QueueIsBoundedAndKeepsOrder) {
  limits_.num_slots = 1;
  config_.max_queue = 3;
  Start();
  for (int i = 0; i < 3; ++i)
    Add(Spec(5, 20, static_cast<uint64_t>(i)));
  EXPECT_TRUE(absl::IsResourceExhausted(driver_->scheduler.Add(next_id_++, Spec(5, 5), 0)));
  driver_->Send();
  Add(Spec(5, 20, 9));  // one left the queue
  std::vector<SequenceId> ended;
  while (!driver_->scheduler.empty()) {
    driver_->SendAll();
    driver_->Receive();
    for (const auto& [id, answer] : driver_->answers) {
      if (answer.num_ends == 1 && std::find(ended.begin(), ended.end(), id) == ended.end()) {
        ended.push_back(id);
      }
    }
  }
  EXPECT_TRUE(std::is_sorted(ended.begin(), ended.end()));
  EXPECT_EQ(ended.size(), 4u);
}

TEST_F(SchedulerTest, SurplusBehindAStopIsDropped) {
  Start();
  SequenceSpec spec = Spec(12, 300, 4);
  const auto all = ToyContinuation(language_, spec.prompt_ids, spec.sampling, 300);
  spec.sampling.stop_token_ids = {all[20]};
  const SequenceId id = Add(spec);
  driver_->RunToEnd();
  ExpectRight(id);
  EXPECT_EQ(driver_->answers[id].end_reason, EndReason::kStopToken);
  EXPECT_GT(driver_->scheduler.counters().num_dropped, 0u);
}

TEST_F(SchedulerTest, ANewEpochGoesOnWithTheSameTokens) {
  Start();
  const SequenceId id = Add(Spec(70, 300));
  for (int i = 0; i < 15; ++i) {
    driver_->Send();
    driver_->Receive();
  }
  const size_t before = driver_->answers[id].tokens.size();
  EXPECT_GT(before, 0u);
  driver_->EndEpoch();
  EXPECT_FALSE(driver_->Send());
  driver_->BeginEpoch(limits_);
  driver_->RunToEnd();
  ExpectRight(id);
}

TEST_F(SchedulerTest, NonFiniteLogitsFailThatRequestOnly) {
  Start();
  const SequenceId bad = Add(Spec(10, 50, 1));
  const SequenceId good = Add(Spec(10, 50, 2));
  std::optional<StepPlan> plan = driver_->scheduler.NextStep(1);
  ASSERT_TRUE(plan.has_value());
  auto result = driver_->worker->Run(*plan);
  ASSERT_TRUE(result.ok());
  result->short_prefill[0].non_finite = true;
  ASSERT_TRUE(driver_->scheduler.Apply(*result).ok());
  driver_->Collect();
  driver_->RunToEnd();
  EXPECT_TRUE(absl::IsInternal(driver_->answers[bad].error));
  ExpectRight(good);
}

TEST_F(SchedulerTest, AResultThatDoesNotAnswerTheOpIsAnError) {
  Start();
  Add(Spec(10, 50));
  std::optional<StepPlan> plan = driver_->scheduler.NextStep(1);
  auto result = driver_->worker->Run(*plan);
  ASSERT_TRUE(result.ok());
  StepResult wrong = *result;
  wrong.short_prefill[0].tokens.push_back(3);
  EXPECT_FALSE(driver_->scheduler.Apply(wrong).ok());
  wrong = *result;
  wrong.op_id = 7;
  EXPECT_FALSE(driver_->scheduler.Apply(wrong).ok());
  wrong = *result;
  wrong.short_prefill.clear();
  EXPECT_FALSE(driver_->scheduler.Apply(wrong).ok());
  EXPECT_TRUE(driver_->scheduler.Apply(*result).ok());
}

}  // namespace
}  // namespace twinspark::gateway
