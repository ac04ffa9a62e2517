// The two threads of an epoch without gRPC, so that ThreadSanitizer sees all of it: order of
// results under run-ahead, ends from every side at once, an end while an op hangs, faults armed
// while ops run; and the ring and the op log on their own.
#include "shard_worker/runtime/epoch_runner.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/file_util.h"
#include "common/testing/temp_dir.h"
#include "shard_worker/runtime/op_log.h"
#include "shard_worker/testing/fake_backend.h"

namespace twinspark {
namespace {

class RecordingSink : public StepsSink {
 public:
  void SendResult(const OpOutcome& outcome) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    outcomes_.push_back(outcome);
    changed_.notify_all();
  }
  void SendHeartbeat(const Heartbeat&) override { ++heartbeats; }
  void Finish(const absl::Status& reason) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    EXPECT_FALSE(finished_) << "finished twice";
    finished_ = true;
    reason_ = reason;
    changed_.notify_all();
  }

  // False when they did not come in 30 s.
  bool WaitForResults(size_t count) {
    std::unique_lock<std::mutex> lock(mutex_);
    return changed_.wait_for(lock, std::chrono::seconds(30), [&] {
      return outcomes_.size() >= count || finished_;
    }) && outcomes_.size() >= count;
  }
  absl::Status WaitForEnd() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!changed_.wait_for(lock, std::chrono::seconds(30), [&] { return finished_; })) {
      return absl::UnknownError("no end within 30 s");
    }
    return reason_;
  }
  std::vector<OpOutcome> outcomes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return outcomes_;
  }

  std::atomic<int> heartbeats{0};

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<OpOutcome> outcomes_;
  bool finished_ = false;
  absl::Status reason_;
};

struct Epoch {
  explicit Epoch(int64_t gateway_silence_ms = 60'000)
      : runner(
            Options(gateway_silence_ms),
            backend,
            state,
            counters,
            [this](const WorkerOp&, const OpOutcome&) { ++ops; },
            [this](const absl::Status&) { ++ends; }) {}

  static EpochRunner::Options Options(int64_t gateway_silence_ms) {
    EpochRunner::Options options;
    options.vocab_size = FakeBackend::kVocab;
    options.num_layers = FakeBackend::kLayers;
    options.heartbeat_interval_ms = 5;
    options.gateway_silence_ms = gateway_silence_ms;
    return options;
  }

  FakeBackend backend;
  std::atomic<WorkerState> state{WorkerState::kServing};
  EpochCounters counters;
  std::atomic<int> ops{0};
  std::atomic<int> ends{0};
  RecordingSink sink;
  EpochRunner runner;
};

WorkerOp FirstOp(uint64_t op_id = 1) {
  WorkerOp op;
  op.op_id = op_id;
  op.deadline_ms = 60'000;
  op.bytes = absl::StrCat("op ", op_id);
  OpenSequencePart part;
  part.open.ids = {1, 2, 3};
  part.total_ids = 3;
  op.controls.emplace_back(part);
  MapPagesControl map;
  for (int page = 0; page < 32; ++page)
    map.pages.push_back({page, page});
  op.controls.emplace_back(map);
  op.short_prefill.push_back({0, 0, 3, true, -1});
  return op;
}

WorkerOp RoundOp(uint64_t op_id) {
  WorkerOp op;
  op.op_id = op_id;
  op.deadline_ms = 60'000;
  op.bytes = absl::StrCat("op ", op_id);
  RoundSequence round;
  round.after_previous = true;
  round.num_drafts = 2;
  round.draft_next = true;
  op.round.push_back(round);
  return op;
}

TEST(EpochRunnerTest, ResultsComeInOrderUnderRunAhead) {
  Epoch epoch;
  epoch.runner.Start(epoch.sink);
  epoch.runner.Submit(FirstOp());
  epoch.runner.Submit(RoundOp(2));
  for (uint64_t op_id = 3; op_id <= 400; ++op_id) {
    ASSERT_TRUE(epoch.sink.WaitForResults(op_id - 2));
    epoch.runner.Submit(RoundOp(op_id));
  }
  ASSERT_TRUE(epoch.sink.WaitForResults(400));
  epoch.runner.End(absl::OkStatus());
  EXPECT_TRUE(epoch.sink.WaitForEnd().ok());
  const std::vector<OpOutcome> outcomes = epoch.sink.outcomes();
  ASSERT_EQ(outcomes.size(), 400u);
  for (size_t i = 0; i < outcomes.size(); ++i) {
    EXPECT_EQ(outcomes[i].op_id, i + 1);
    EXPECT_TRUE(outcomes[i].status.ok()) << outcomes[i].status;
  }
  EXPECT_EQ(epoch.ops.load(), 400);
  EXPECT_EQ(epoch.ends.load(), 1);
}

// A round sent ahead of a result that is not finite must not take the other sequences down.
TEST(OpExecutorTest, NonFiniteRowStallsItsSequenceOnly) {
  FakeBackend backend;
  OpExecutor executor(backend, FakeBackend::kVocab, FakeBackend::kLayers);
  ASSERT_TRUE(executor.Execute(FirstOp(1)).status.ok());
  WorkerOp second = FirstOp(2);
  std::get<OpenSequencePart>(second.controls[0]).open.slot = 1;
  std::get<MapPagesControl>(second.controls[1]).slot = 1;
  second.short_prefill[0].slot = 1;
  backend.non_finite.store(true);
  const OpOutcome bad = executor.Execute(second);
  ASSERT_TRUE(bad.status.ok()) << bad.status;
  EXPECT_TRUE(bad.short_prefill[0].result.non_finite);
  backend.non_finite.store(false);
  WorkerOp round = RoundOp(3);
  round.round.push_back(round.round[0]);
  round.round[0].slot = 1;
  const OpOutcome both = executor.Execute(round);
  ASSERT_TRUE(both.status.ok()) << both.status;
  ASSERT_EQ(both.round.size(), 2u);
  EXPECT_EQ(both.round[0].result.slot, 1);
  EXPECT_TRUE(both.round[0].result.non_finite);
  EXPECT_TRUE(both.round[0].result.tokens.empty());
  EXPECT_EQ(both.round[1].result.slot, 0);
  EXPECT_FALSE(both.round[1].result.non_finite);
  EXPECT_FALSE(both.round[1].result.tokens.empty());
  WorkerOp close;
  close.op_id = 4;
  close.controls.emplace_back(CloseSequenceControl{1});
  ASSERT_TRUE(executor.Execute(close).status.ok());
  WorkerOp again = second;
  again.op_id = 5;
  const OpOutcome reopened = executor.Execute(again);
  ASSERT_TRUE(reopened.status.ok()) << reopened.status;
  EXPECT_FALSE(reopened.short_prefill[0].result.non_finite);
}

TEST(EpochRunnerTest, EndsFromEverySideAtOnceEndOnce) {
  for (int round = 0; round < 20; ++round) {
    Epoch epoch;
    epoch.runner.Start(epoch.sink);
    std::vector<std::thread> enders;
    for (int i = 0; i < 4; ++i) {
      enders.emplace_back([&epoch, i] { epoch.runner.End(absl::AbortedError(absl::StrCat(i))); });
    }
    epoch.runner.Submit(FirstOp());
    epoch.runner.Submit(RoundOp(2));
    epoch.runner.Submit(RoundOp(3));  // possibly one too many: then it is an end as well
    for (std::thread& ender : enders)
      ender.join();
    EXPECT_FALSE(epoch.sink.WaitForEnd().ok());
    epoch.runner.Join();
    EXPECT_EQ(epoch.ends.load(), 1);
  }
}

TEST(EpochRunnerTest, HangingOpIsAbortedAndHeartbeatsGoOnMeanwhile) {
  Epoch epoch;
  epoch.backend.hang.store(true);
  epoch.runner.Start(epoch.sink);
  epoch.runner.Submit(FirstOp());
  for (int i = 0; i < 3000 && epoch.sink.heartbeats.load() < 10; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  EXPECT_GE(epoch.sink.heartbeats.load(), 10);
  epoch.runner.End(absl::UnavailableError("lost"));
  EXPECT_EQ(epoch.sink.WaitForEnd(), absl::UnavailableError("lost"));
  ASSERT_EQ(epoch.sink.outcomes().size(), 1u) << "the aborted op is still answered";
  EXPECT_EQ(epoch.sink.outcomes()[0].status, absl::UnavailableError("lost"));
}

TEST(EpochRunnerTest, ALateOpIsAnsweredWithItsDeadline) {
  Epoch epoch;
  epoch.backend.hang.store(true);
  epoch.runner.Start(epoch.sink);
  WorkerOp op = FirstOp();
  op.deadline_ms = 1;  // the least there is counts
  epoch.runner.Submit(op);
  const absl::Status end = epoch.sink.WaitForEnd();
  EXPECT_EQ(end.code(), absl::StatusCode::kDeadlineExceeded) << end;
  ASSERT_EQ(epoch.sink.outcomes().size(), 1u);
  EXPECT_EQ(epoch.sink.outcomes()[0].status, end) << "not how the backend was broken off";
}

TEST(EpochRunnerTest, SilentGatewayEndsTheEpoch) {
  Epoch epoch(/*gateway_silence_ms=*/50);
  epoch.runner.Start(epoch.sink);
  const absl::Status end = epoch.sink.WaitForEnd();
  EXPECT_EQ(end.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(end.message()), ::testing::HasSubstr("silent"));
}

TEST(EpochRunnerTest, FaultsAreArmedOneAtATime) {
  Epoch epoch;
  ASSERT_TRUE(epoch.runner.Arm({}).ok());
  EXPECT_FALSE(epoch.runner.Arm({}).ok());
  epoch.runner.Start(epoch.sink);
  epoch.runner.Submit(FirstOp());
  ASSERT_TRUE(epoch.sink.WaitForResults(1));
  EXPECT_EQ(epoch.backend.faults.load(), 1);
  EXPECT_TRUE(epoch.runner.Arm({}).ok());
}

TEST(SpscRingTest, EverythingArrivesInOrder) {
  SpscRing<int, 4> ring;
  constexpr int kCount = 20'000;
  std::thread producer([&] {
    for (int i = 0; i < kCount;) {
      if (ring.Push(i)) {
        ++i;
      } else {
        std::this_thread::yield();
      }
    }
  });
  for (int expected = 0; expected < kCount;) {
    if (const std::optional<int> value = ring.Pop()) {
      ASSERT_EQ(*value, expected++);
    } else {
      ring.Wait();
    }
  }
  producer.join();
  EXPECT_FALSE(ring.Pop().has_value());
}

TEST(OpLogTest, ComesBackAsWrittenAlsoWhenCutShort) {
  const TempDir dir;
  GroupConfig group;
  group.epoch = 12;
  group.rank = 1;
  group.world = 2;
  group.model_dir = "/models/a=b";
  group.limits.num_pages = 77;
  {
    OpLogWriter writer(dir.path());
    for (uint64_t op_id = 1; op_id <= 3; ++op_id) {
      OpOutcome outcome;
      outcome.op_id = op_id;
      outcome.digest = op_id * 1000;
      writer.Write(group, RoundOp(op_id), outcome);
    }
  }
  const std::string path = (dir / "epoch-12-rank-1.oplog").string();
  const auto log = ReadOpLog(path);
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_EQ(log->group.epoch, 12u);
  EXPECT_EQ(log->group.world, 2);
  EXPECT_EQ(log->group.model_dir, "/models/a=b");
  EXPECT_EQ(log->group.limits.num_pages, 77);
  ASSERT_EQ(log->ops.size(), 3u);
  EXPECT_EQ(log->ops[2].bytes, "op 3");
  EXPECT_EQ(log->ops[2].digest, 3000u);
  const auto whole = ReadFile(path, 1 << 20);
  ASSERT_TRUE(whole.ok());
  for (size_t size = 8; size < whole->size(); ++size) {
    ASSERT_TRUE(WriteFileAtomically(path, whole->substr(0, size)).ok());
    const auto part = ReadOpLog(path);
    ASSERT_TRUE(part.ok()) << size << ": " << part.status();
    EXPECT_LE(part->ops.size(), 3u);
  }
  ASSERT_TRUE(WriteFileAtomically(path, "something else").ok());
  EXPECT_FALSE(ReadOpLog(path).ok());
}

}  // namespace
}  // namespace twinspark
