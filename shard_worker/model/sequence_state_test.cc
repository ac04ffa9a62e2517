// What a draw is told about its sequence: penalty counts that follow appends and truncations, stop
// ids banned before min_tokens, ends of bad words, also across drafts.
#include "shard_worker/model/sequence_state.h"

#include <map>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace twinspark {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::map<int32_t, std::pair<int, int>> Counts(const SequenceState& s) {
  std::map<int32_t, std::pair<int, int>> out;
  for (const TokenCount& count : s.counts)
    if (count.in_prompt + count.generated > 0) out[count.id] = {count.in_prompt, count.generated};
  return out;
}

SequenceState Opened() {
  SequenceState s;
  s.ids = {5, 6, 5};
  s.num_given = s.num_prompt_ids = 3;
  return s;
}

TEST(SequenceState, CountsFollowAppendAndTruncate) {
  SequenceState s = Opened();
  SamplingParams params;
  params.presence_penalty = 0.5f;
  s.SetSampling(params);
  s.Append(6);
  s.Append(7);
  EXPECT_EQ(Counts(s),
            (std::map<int32_t, std::pair<int, int>>{{5, {2, 0}}, {6, {1, 1}}, {7, {0, 1}}}));
  s.TruncateIds(4);
  EXPECT_EQ(Counts(s), (std::map<int32_t, std::pair<int, int>>{{5, {2, 0}}, {6, {1, 1}}}));
  // Penalties that are switched on late see the past, switched off cost nothing.
  s.SetSampling({});
  EXPECT_THAT(s.counts, IsEmpty());
  s.SetSampling(params);
  EXPECT_EQ(Counts(s)[6], (std::pair<int, int>{1, 1}));
}

TEST(SequenceState, StopIdsAreBannedUntilMinTokens) {
  SequenceState s = Opened();
  SamplingParams params;
  params.min_tokens = 2;
  params.stop_ids = {1, 9};
  s.SetSampling(params);
  std::vector<int32_t> banned;
  s.MakeChoiceRow(3, {}, banned);  // output token 0
  EXPECT_THAT(banned, ElementsAre(1, 9));
  banned.clear();
  const int32_t drafts[] = {4, 4};
  s.MakeChoiceRow(5, drafts, banned);  // output token 2, behind two drafts
  EXPECT_THAT(banned, IsEmpty());
}

TEST(SequenceState, BadWordsEndAcrossIdsAndDrafts) {
  SequenceState s = Opened();
  SamplingParams params;
  params.bad_words = {{8}, {6, 5, 3}, {5, 4, 2}, {4, 2}};
  s.SetSampling(params);
  std::vector<int32_t> banned;
  s.MakeChoiceRow(3, {}, banned);
  EXPECT_THAT(banned, ElementsAre(8, 3));
  banned.clear();
  const int32_t drafts[] = {4};
  s.MakeChoiceRow(4, drafts, banned);
  EXPECT_THAT(banned, ElementsAre(8, 2, 2));
}

TEST(SequenceState, TheRowCarriesThePosition) {
  SequenceState s = Opened();
  SamplingParams params;
  params.seed = 77;
  params.temperature = 0.5f;
  params.choice = 3;
  s.SetSampling(params);
  std::vector<int32_t> banned;
  const ChoiceRow row = s.MakeChoiceRow(12, {}, banned);
  EXPECT_EQ(row.seed, 77u);
  EXPECT_EQ(row.position, 12u);
  EXPECT_EQ(row.choice, 3u);
  EXPECT_EQ(row.temperature, 0.5f);
}

}  // namespace
}  // namespace twinspark
