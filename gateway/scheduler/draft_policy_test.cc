// Depths of a round: the row budget, in order, and the clamps at the end of an output.
#include "gateway/scheduler/draft_policy.h"

#include <numeric>

#include <gtest/gtest.h>

namespace twinspark::gateway {
namespace {

int Rows(const std::vector<int>& depths) {
  int rows = 0;
  for (const int k : depths)
    rows += 1 + k;  // kNotThisRound adds none
  return rows;
}

TEST(AllocateDrafts, GrantsAllWhatFits) {
  EXPECT_EQ(AllocateDrafts(std::vector<int>{3, 5, 0}, 48), (std::vector<int>{3, 5, 0}));
  EXPECT_TRUE(AllocateDrafts(std::vector<int>{}, 48).empty());
}

TEST(AllocateDrafts, LowersEveryKAlikeAndGivesOutTheRest) {
  const auto depths = AllocateDrafts(std::vector<int>(10, 5), 48);
  EXPECT_EQ(Rows(depths), 48);
  EXPECT_EQ(depths, (std::vector<int>{4, 4, 4, 4, 4, 4, 4, 4, 3, 3}));
}

TEST(AllocateDrafts, SomeWaitWhenEvenOneRowEachIsTooMuch) {
  const auto depths = AllocateDrafts(std::vector<int>(10, 2), 6);
  EXPECT_EQ(Rows(depths), 6);
  EXPECT_EQ(depths[5], 0);
  EXPECT_EQ(depths[6], kNotThisRound);
}

TEST(MaxDraftsOfRound, EndsWithTheOutput) {
  Sequence sequence;
  sequence.ids.assign(10, 0);
  sequence.num_prompt_ids = 10;
  sequence.max_drafts = 5;
  sequence.num_kept_drafts = 5;
  sequence.max_total_ids = 30;
  EXPECT_EQ(MaxDraftsOfRound(sequence, 0), 5);
  sequence.max_total_ids = 13;  // a round of k emits up to k + 1
  EXPECT_EQ(MaxDraftsOfRound(sequence, 0), 2);
  EXPECT_EQ(MaxDraftsOfRound(sequence, 2), 0);
  sequence.max_total_ids = 30;
  sequence.num_kept_drafts = 0;
  EXPECT_EQ(MaxDraftsOfRound(sequence, 0), 0);
}

TEST(DraftsWanted, NotForTheLastToken) {
  Sequence sequence;
  sequence.max_drafts = 3;
  EXPECT_TRUE(DraftsWanted(sequence, 2));
  EXPECT_FALSE(DraftsWanted(sequence, 1));
  sequence.max_drafts = 0;
  EXPECT_FALSE(DraftsWanted(sequence, 2));
}

}  // namespace
}  // namespace twinspark::gateway
