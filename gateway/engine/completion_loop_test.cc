// The engine thread's wait. Goal: a Wake from any thread, before or during the wait, ends it, and
// never more than the waits it was for; what was pushed before it is seen after it. Method: long
// time-outs that only a lost wake-up can reach.
#include "gateway/engine/completion_loop.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <thread>
#include <vector>

#include <grpc/support/time.h>
#include <grpcpp/alarm.h>

#include <gtest/gtest.h>

#include "common/limits.h"
#include "gateway/engine/engine_inbox.h"

namespace twinspark::gateway {
namespace {

constexpr int64_t kLongUs = 60'000'000;

double Seconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

TEST(CompletionLoop, WaitsNoLongerThanAsked) {
  CompletionLoop loop;
  EXPECT_FALSE(loop.RunOne(0));
  EXPECT_FALSE(loop.RunOne(2000));
}

TEST(CompletionLoop, AWakeBeforeTheWaitEndsIt) {
  CompletionLoop loop;
  const auto start = std::chrono::steady_clock::now();
  loop.Wake();
  loop.Wake();  // not heard yet: the same one
  EXPECT_FALSE(loop.RunOne(kLongUs));
  EXPECT_LT(Seconds(start), 30);
}

// Counts how often it came back, and starts the next one until there have been `wanted`.
class Chain : public Completion {
 public:
  Chain(CompletionLoop& loop, int wanted, int* num_done)
      : loop_(loop), wanted_(wanted), num_done_(*num_done) {
    Start();
  }
  void OnComplete(bool /*ok*/) override {
    if (++num_done_ < wanted_) Start();
  }

 private:
  void Start() {
    alarm_ = std::make_unique<grpc::Alarm>();
    alarm_->Set(&loop_.queue(), gpr_time_0(GPR_CLOCK_MONOTONIC), loop_.Started(this));
  }

  CompletionLoop& loop_;
  const int wanted_;
  int& num_done_;
  std::unique_ptr<grpc::Alarm> alarm_;
};

TEST(CompletionLoop, DestructionHandlesWhatIsUnderWayAndAWakeUnheard) {
  int num_done = 0;
  std::unique_ptr<Chain> chain;
  const auto start = std::chrono::steady_clock::now();
  {
    CompletionLoop loop;
    loop.Wake();
    chain = std::make_unique<Chain>(loop, 3, &num_done);
    EXPECT_EQ(num_done, 0) << "nobody waits in the loop yet";
  }
  EXPECT_EQ(num_done, 3) << "also those that others started";
  EXPECT_LT(Seconds(start), 50);
}

TEST(EngineInbox, NoMessageOfAnyThreadIsLost) {
  constexpr int kThreads = 4;
  constexpr int kMessages = 2000;
  CompletionLoop loop;
  EngineInbox inbox(loop);
  std::vector<std::thread> senders;
  for (int sender = 0; sender < kThreads; ++sender) {
    senders.emplace_back([&inbox, sender] {
      for (int i = 0; i < kMessages; ++i)
        inbox.Push(EndMessage{static_cast<GenerateId>(sender), EndReason::kCancelled});
    });
  }
  const auto start = std::chrono::steady_clock::now();
  size_t taken = 0;
  while (taken < size_t{kThreads} * kMessages && Seconds(start) < 50)
    taken += inbox.Take(kLongUs).size();
  for (std::thread& sender : senders)
    sender.join();
  EXPECT_EQ(taken, size_t{kThreads} * kMessages);
  EXPECT_LT(Seconds(start), 50);
}

TEST(EngineInbox, WakeEndsATakeWithoutAMessage) {
  CompletionLoop loop;
  EngineInbox inbox(loop);
  std::atomic<bool> taken{false};
  std::thread taker([&] {
    EXPECT_TRUE(inbox.Take(kLongUs).empty());
    taken = true;
  });
  const auto start = std::chrono::steady_clock::now();
  while (!taken && Seconds(start) < 50) {
    inbox.Wake();
    std::this_thread::yield();
  }
  taker.join();
  EXPECT_LT(Seconds(start), 50);
}

}  // namespace
}  // namespace twinspark::gateway
