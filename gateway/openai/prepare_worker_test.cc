// Goal: large requests do not hold up smaller ones, none waits for ever, and what nobody waits for
// is dropped. Method: a first task blocks the thread that takes everything; what the others do
// meanwhile, and in which order, is counted.
#include "gateway/openai/prepare_worker.h"

#include <atomic>
#include <chrono>
#include <future>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace twinspark::gateway {
namespace {

using ::testing::ElementsAre;

constexpr size_t kLarge = PrepareWorker::kMaxSmallBytes + 1;

// A large task that runs until it is released.
class Blocker {
 public:
  explicit Blocker(PrepareWorker& worker) {
    EXPECT_TRUE(worker.Run({kLarge, nullptr, [this] {
                              begun_.set_value();
                              release_.get_future().wait();
                            }}));
    begun_.get_future().wait();
  }
  void Release() { release_.set_value(); }

 private:
  std::promise<void> begun_, release_;
};

TEST(PrepareWorker, SmallTasksPassLargeOnes) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  std::atomic<int> num_begun{0}, num_ended{0};
  {
    PrepareWorker worker(100 * kLarge);
    for (int i = 0; i < 4; ++i) {
      EXPECT_TRUE(worker.Run({kLarge, nullptr, [&, released] {
                                ++num_begun;
                                released.wait();
                                ++num_ended;
                              }}));
    }
    for (int i = 0; i < 20; ++i) {
      const auto ran = std::make_shared<std::promise<void>>();
      EXPECT_TRUE(
          worker.Run({PrepareWorker::kMaxSmallBytes, nullptr, [ran] { ran->set_value(); }}));
      // Never, if large tasks could take both threads.
      const auto state = ran->get_future().wait_for(std::chrono::seconds(60));
      EXPECT_EQ(state, std::future_status::ready);
      if (state != std::future_status::ready) break;
    }
    EXPECT_LE(num_begun.load(), 1) << "one at a time";
    release.set_value();
  }
  EXPECT_EQ(num_ended.load(), num_begun.load()) << "the rest was dropped with the worker";
}

TEST(PrepareWorker, SmallestFirstAndTheOldestNowAndThen) {
  PrepareWorker worker(100 * kLarge);
  Blocker blocker(worker);
  std::vector<size_t> order;
  std::promise<void> all_ran;
  const std::vector<size_t> sizes = {9, 3, 8, 1, 7, 2, 6};
  for (const size_t size : sizes) {
    EXPECT_TRUE(worker.Run({kLarge + size, nullptr, [&, size] {
                              order.push_back(size);
                              if (order.size() == sizes.size()) all_ran.set_value();
                            }}));
  }
  blocker.Release();
  all_ran.get_future().wait();
  // The blocker was the first of four: two by size, then the oldest, three by size, the oldest.
  EXPECT_THAT(order, ElementsAre(1, 2, 9, 3, 6, 7, 8));
}

TEST(PrepareWorker, WhatNobodyWaitsForIsDropped) {
  PrepareWorker worker(3 * kLarge);
  Blocker blocker(worker);
  const auto gone = std::make_shared<std::atomic<bool>>(false);
  bool ran = false;
  EXPECT_TRUE(worker.Run({2 * kLarge, gone, [&] { ran = true; }}));
  EXPECT_FALSE(worker.Run({1, nullptr, [] {}})) << "the bytes are used up";
  gone->store(true);
  std::promise<void> next;
  EXPECT_TRUE(worker.Run({kLarge, nullptr, [&] { next.set_value(); }})) << "and given back";
  blocker.Release();
  next.get_future().wait();
  EXPECT_FALSE(ran);
}

}  // namespace
}  // namespace twinspark::gateway
