// Threads as ranks: sums in rank order with equal bits everywhere, gathers in rank order, ranks
// that disagree, a rank that does not come, abort.
#include "shard_worker/parallel/local_communicator.h"

#include <cstring>
#include <functional>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/testing/seeded_rng.h"

namespace twinspark {
namespace {

void OnAll(std::vector<std::unique_ptr<Communicator>>& ranks,
           const std::function<void(Communicator&)>& fn) {
  std::vector<std::thread> threads;
  for (auto& rank : ranks)
    threads.emplace_back([&fn, &rank] { fn(*rank); });
  for (std::thread& thread : threads)
    thread.join();
}

TEST(LocalCommunicator, SumsInRankOrder) {
  for (const int world : {1, 2, 3, 4}) {
    auto ranks = MakeLocalGroup(world, 60000);
    const size_t n = 1000;
    std::vector<std::vector<float>> values(static_cast<size_t>(world));
    SeededRng rng(TestSeed(7));
    for (auto& list : values)
      for (size_t i = 0; i < n; ++i)
        list.push_back(rng.Float(-1e4f, 1e4f));
    std::vector<float> want = values[0];
    for (int r = 1; r < world; ++r)
      for (size_t i = 0; i < n; ++i)
        want[i] += values[static_cast<size_t>(r)][i];
    OnAll(ranks, [&](Communicator& rank) {
      EXPECT_TRUE(rank.AllReduceSum(values[static_cast<size_t>(rank.rank())]).ok());
    });
    for (const auto& list : values)
      EXPECT_EQ(std::memcmp(list.data(), want.data(), n * sizeof(float)), 0) << world;
  }
}

TEST(LocalCommunicator, GathersInRankOrderAlsoInPlace) {
  auto ranks = MakeLocalGroup(3, 60000);
  OnAll(ranks, [](Communicator& rank) {
    for (int round = 0; round < 100; ++round) {
      std::vector<std::byte> all(12);
      const auto own = std::span(all).subspan(4 * static_cast<size_t>(rank.rank()), 4);
      for (std::byte& b : own)
        b = static_cast<std::byte>(10 * rank.rank() + round % 10);
      ASSERT_TRUE(rank.AllGather(own, all).ok());
      for (size_t i = 0; i < all.size(); ++i)
        ASSERT_EQ(static_cast<int>(all[i]), 10 * static_cast<int>(i / 4) + round % 10);
    }
  });
}

TEST(LocalCommunicator, RanksThatDisagreeAreAnError) {
  auto ranks = MakeLocalGroup(2, 60000);
  std::vector<absl::Status> statuses(2);
  OnAll(ranks, [&](Communicator& rank) {
    std::vector<float> values(rank.rank() == 0 ? 4 : 5);
    statuses[static_cast<size_t>(rank.rank())] = rank.AllReduceSum(values);
  });
  for (const absl::Status& status : statuses)
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
}

TEST(LocalCommunicator, ARankThatDoesNotComeIsADeadline) {
  auto ranks = MakeLocalGroup(2, 50);
  EXPECT_EQ(ranks[0]->Barrier().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(ranks[1]->Barrier().code(), absl::StatusCode::kUnavailable);
}

TEST(LocalCommunicator, AbortEndsAWaitingCall) {
  auto ranks = MakeLocalGroup(2, 60000);
  absl::Status status;
  std::thread waiting([&] { status = ranks[0]->Barrier(); });
  ranks[1]->Abort();
  waiting.join();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
}

}  // namespace
}  // namespace twinspark
