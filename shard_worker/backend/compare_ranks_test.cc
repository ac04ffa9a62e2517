// Ranks as threads: what differs is named on every rank with both values, what only one rank knows
// is no difference.
#include "shard_worker/backend/compare_ranks.h"

#include <functional>
#include <memory>
#include <thread>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "shard_worker/parallel/local_communicator.h"

namespace twinspark {
namespace {

using ::testing::HasSubstr;

constexpr int kTimeoutMs = 60000;

// What every rank of a group of two got.
std::vector<absl::Status> OnBoth(const std::function<absl::Status(Communicator&)>& fn) {
  auto ranks = MakeLocalGroup(2, kTimeoutMs);
  std::vector<absl::Status> results(ranks.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < ranks.size(); ++i)
    threads.emplace_back([&, i] { results[i] = fn(*ranks[i]); });
  for (std::thread& thread : threads)
    thread.join();
  return results;
}

TEST(CompareRanks, AFactThatDiffersIsNamedWithBothValues) {
  const auto same = OnBoth([](Communicator& c) {
    const std::vector<RankFact> facts = {{"build", "a"}, {"config digest", std::string(200, 'x')}};
    return CompareFacts(c, facts);
  });
  EXPECT_TRUE(same[0].ok() && same[1].ok()) << same[0] << same[1];
  const auto differ = OnBoth([](Communicator& c) {
    const std::vector<RankFact> facts = {{"build", "a"}, {"weights", c.rank() == 0 ? "w0" : "w1"}};
    return CompareFacts(c, facts);
  });
  EXPECT_EQ(differ[0].code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(differ[0].message(), HasSubstr("weights differs: rank 0 has w0, rank 1 has w1"));
  EXPECT_THAT(differ[1].message(), HasSubstr("weights differs: rank 1 has w1, rank 0 has w0"));
}

TEST(CompareRanks, OneVoteIsEnough) {
  for (const int voter : {0, 1, 2}) {
    const auto votes = OnBoth([&](Communicator& c) -> absl::Status {
      const auto voted = TestGroup(c, c.rank() == voter);
      if (!voted.ok()) return voted.status();
      return *voted == (voter < 2) ? absl::OkStatus() : absl::InternalError("another result");
    });
    EXPECT_TRUE(votes[0].ok() && votes[1].ok()) << votes[0] << votes[1];
  }
}

// Two layers of four columns whose samples are all known.
RowSamples Known() {
  RowSamples samples(2);
  for (char layer = 0; layer < 2; ++layer) {
    for (char column = 0; column < 4; ++column)
      samples[static_cast<size_t>(layer)].emplace_back(16,
                                                       static_cast<char>(1 + 4 * layer + column));
  }
  return samples;
}

std::vector<absl::Status> Compare(const RowSamples& rank0, const RowSamples& rank1) {
  return OnBoth([&](Communicator& c) {
    const RowSamples& mine = c.rank() == 0 ? rank0 : rank1;
    return CompareRowSamples(c, mine, std::vector<int>{1, 14}, 4);
  });
}

TEST(CompareRanks, RowsThatBothKnowMustBeEqual) {
  RowSamples other = Known();
  const auto same = Compare(Known(), other);
  EXPECT_TRUE(same[0].ok() && same[1].ok()) << same[0] << same[1];
  other[1][2][15] = 'x';
  for (const absl::Status& result : Compare(Known(), other)) {
    EXPECT_EQ(result.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(result.message(), HasSubstr("row digest differs"));
    EXPECT_THAT(result.message(), HasSubstr("layer 14 column 2"));
  }
}

TEST(CompareRanks, WhatOneRankDoesNotKnowIsNoDifference) {
  RowSamples half = Known();  // a packed file without a manifest knows its own columns
  half[0][0].clear();
  half[0][1].clear();
  half[1][0].clear();
  half[1][1].clear();
  const auto fits = Compare(half, Known());
  EXPECT_TRUE(fits[0].ok() && fits[1].ok()) << fits[0] << fits[1];
  RowSamples other_half = Known();  // nothing in common
  other_half[0][2].clear();
  other_half[0][3].clear();
  other_half[1][2].clear();
  other_half[1][3].clear();
  other_half[0][0][0] = 'x';
  const auto apart = Compare(half, other_half);
  EXPECT_TRUE(apart[0].ok() && apart[1].ok()) << apart[0] << apart[1];
  const auto nothing = Compare({}, Known());  // rows that do not come from a row service
  EXPECT_TRUE(nothing[0].ok() && nothing[1].ok()) << nothing[0] << nothing[1];
  half[0][3][7] = 'x';
  EXPECT_FALSE(Compare(half, Known())[0].ok());
}

}  // namespace
}  // namespace twinspark
