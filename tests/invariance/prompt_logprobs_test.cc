// The log-probabilities of a prompt's tokens do not depend on how the prompt is cut, on who shares
// the steps, on the number of ranks or on how many rows go through the head at once; and they are
// those that generation reports for the same tokens after the same prefix. Bit for bit.
#include <bit>

#include <gtest/gtest.h>

#include "common/check.h"
#include "tests/golden/model/model_group.h"
#include "tests/invariance/row_recorder.h"

namespace twinspark::invariance {
namespace {

constexpr int64_t kMaxLength = 512;
constexpr int32_t kTop = 4;

struct Shape {
  int world = 1;
  int threads = 1;
  int max_step_rows = 512;
  int max_logits_rows = 64;
};

std::unique_ptr<golden::ModelGroup> Load(const Shape& shape) {
  ModelOptions options;
  options.world = shape.world;
  options.limits.num_slots = 3;
  options.limits.num_pages = 24;
  options.limits.max_step_rows = shape.max_step_rows;
  options.limits.max_logits_rows = shape.max_logits_rows;
  options.limits.max_context = kMaxLength;
  auto group =
      golden::ModelGroup::Load(TWINSPARK_SOURCE_DIR "/deploy/demo_model", options, shape.threads);
  CHECK(group.ok()) << group.status();
  return *std::move(group);
}

void Open(golden::ModelGroup& group,
          int slot,
          const std::vector<int32_t>& ids,
          size_t num_prompt_ids,
          int32_t num_prompt_logprobs) {
  OpenSequence open;
  open.slot = slot;
  open.ids = ids;
  open.num_prompt_ids = static_cast<int64_t>(num_prompt_ids);
  open.num_prompt_logprobs = num_prompt_logprobs;
  open.sampling.num_logprobs = kTop;
  const absl::Status opened = group.Open(open, kMaxLength);
  CHECK(opened.ok()) << opened;
}

// Prefills the slot in steps of `chunk` rows; other slots may have their rows in the same steps.
std::vector<TokenLogprobs> Prefill(golden::ModelGroup& group,
                                   int slot,
                                   size_t length,
                                   int64_t chunk,
                                   std::vector<TokenLogprobs>* generated = nullptr) {
  std::vector<TokenLogprobs> all;
  const auto end = static_cast<int64_t>(length);
  for (int64_t at = 0; at < end; at += chunk) {
    StepPlan plan;
    plan.prefill.push_back({slot, at, std::min(end, at + chunk), true, -1});
    const auto result = group.RunStep(plan);
    CHECK(result.ok()) << result.status();
    const SequenceResult& one = result->sequences[0];
    all.insert(all.end(), one.prompt_logprobs.begin(), one.prompt_logprobs.end());
    if (generated != nullptr) *generated = one.logprobs;
  }
  return all;
}

void ExpectSame(const TokenLogprobs& a, const TokenLogprobs& b, const std::string& where) {
  EXPECT_EQ(a.token.id, b.token.id) << where;
  EXPECT_EQ(std::bit_cast<uint32_t>(a.token.logprob), std::bit_cast<uint32_t>(b.token.logprob))
      << where << ": " << a.token.logprob << " and " << b.token.logprob;
  EXPECT_EQ(a.rank, b.rank) << where;
  ASSERT_EQ(a.top.size(), b.top.size()) << where;
  for (size_t i = 0; i < a.top.size(); ++i) {
    EXPECT_EQ(a.top[i].id, b.top[i].id) << where;
    EXPECT_EQ(std::bit_cast<uint32_t>(a.top[i].logprob), std::bit_cast<uint32_t>(b.top[i].logprob))
        << where;
  }
}

void ExpectSame(const std::vector<TokenLogprobs>& a,
                const std::vector<TokenLogprobs>& b,
                const std::string& where) {
  ASSERT_EQ(a.size(), b.size()) << where;
  for (size_t i = 0; i < a.size(); ++i)
    ExpectSame(a[i], b[i], where + ", entry " + std::to_string(i));
}

// Alone, in one piece.
std::vector<TokenLogprobs> Whole(const std::vector<int32_t>& prompt) {
  const auto group = Load({});
  Open(*group, 0, prompt, prompt.size(), kTop);
  return Prefill(*group, 0, prompt.size(), kMaxLength);
}

TEST(PromptLogprobsTest, EveryTokenAfterTheFirst) {
  const std::vector<int32_t> prompt = DemoPrompt("recall_300");
  const std::vector<TokenLogprobs> whole = Whole(prompt);
  ASSERT_EQ(whole.size(), prompt.size() - 1);
  size_t best = 0, listed = 0;
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_EQ(whole[i].token.id, prompt[i + 1]);
    ASSERT_EQ(whole[i].top.size(), size_t{kTop});
    for (size_t n = 1; n < kTop; ++n)
      EXPECT_GE(whole[i].top[n - 1].logprob, whole[i].top[n].logprob);
    EXPECT_GE(whole[i].rank, 1);
    best += whole[i].rank == 1 ? 1 : 0;
    if (whole[i].rank > kTop) continue;
    ++listed;
    const TokenLogprob& same = whole[i].top[static_cast<size_t>(whole[i].rank) - 1];
    EXPECT_EQ(same.id, whole[i].token.id);
    EXPECT_EQ(same.logprob, whole[i].token.logprob);
  }
  // The demo model knows such texts: otherwise the comparisons below would be of noise.
  EXPECT_GT(best, whole.size() / 4);
  EXPECT_GT(listed, best);
}

TEST(PromptLogprobsTest, ChunkedIsWhole) {
  const std::vector<int32_t> prompt = DemoPrompt("recall_300");
  const std::vector<TokenLogprobs> whole = Whole(prompt);
  for (const int64_t chunk : {1, 7, 64, 129}) {
    const auto group = Load({});
    Open(*group, 0, prompt, prompt.size(), kTop);
    ExpectSame(Prefill(*group, 0, prompt.size(), chunk), whole, "chunk " + std::to_string(chunk));
  }
  // Passes of 100 rows, 3 rows of logits at a time.
  const auto group = Load({.max_step_rows = 100, .max_logits_rows = 3});
  Open(*group, 0, prompt, prompt.size(), kTop);
  ExpectSame(Prefill(*group, 0, prompt.size(), kMaxLength), whole, "small workspace");
}

TEST(PromptLogprobsTest, TwoRanksAreOne) {
  const std::vector<int32_t> prompt = DemoPrompt("json_schema");
  const std::vector<TokenLogprobs> whole = Whole(prompt);
  const auto group = Load({.world = 2, .threads = 2});
  Open(*group, 0, prompt, prompt.size(), kTop);
  ExpectSame(Prefill(*group, 0, prompt.size(), 50), whole, "two ranks");
}

TEST(PromptLogprobsTest, InCompanyIsAlone) {
  const std::vector<int32_t> first = DemoPrompt("json_schema"), second = DemoPrompt("story");
  const std::vector<int32_t> talker = DemoPrompt("hello");
  const auto group = Load({});
  Open(*group, 2, talker, talker.size(), -1);
  EXPECT_TRUE(Prefill(*group, 2, talker.size(), kMaxLength).empty());
  Open(*group, 0, first, first.size(), kTop);
  Open(*group, 1, second, second.size(), 1);
  std::vector<TokenLogprobs> of_first, of_second;
  const auto length = [](const std::vector<int32_t>& ids) {
    return static_cast<int64_t>(ids.size());
  };
  for (int64_t at = 0; at < length(first) || at < length(second); at += 13) {
    StepPlan plan;
    RoundSequence round;
    round.slot = 2;
    round.first_position = group->model().CommittedLength(2);
    round.num_drafts = 2;
    round.draft_next = true;
    plan.round.push_back(round);
    const auto add = [&](int slot, int64_t end) {
      if (at < end) plan.prefill.push_back({slot, at, std::min(end, at + 13), true, -1});
    };
    add(1, length(second));
    add(0, length(first));
    const auto result = group->RunStep(plan);
    ASSERT_TRUE(result.ok()) << result.status();
    for (const SequenceResult& one : result->sequences) {
      std::vector<TokenLogprobs>& to = one.slot == 0 ? of_first : of_second;
      EXPECT_TRUE(one.slot != 2 || one.prompt_logprobs.empty());
      to.insert(to.end(), one.prompt_logprobs.begin(), one.prompt_logprobs.end());
    }
  }
  ExpectSame(of_first, Whole(first), "first");
  std::vector<TokenLogprobs> expected = Whole(second);
  for (TokenLogprobs& entry : expected)
    entry.top.resize(1);
  ExpectSame(of_second, expected, "second");
}

TEST(PromptLogprobsTest, EqualToThoseOfGeneration) {
  const std::vector<int32_t> prompt = DemoPrompt("story");
  const auto group = Load({});
  Open(*group, 0, prompt, prompt.size(), -1);
  std::vector<TokenLogprobs> generated;
  Prefill(*group, 0, prompt.size(), kMaxLength, &generated);
  std::vector<int32_t> ids = prompt;
  while (generated.size() < 30) {
    const auto round = group->Round(0, 3, true);
    ASSERT_TRUE(round.ok()) << round.status();
    generated.insert(generated.end(), round->logprobs.begin(), round->logprobs.end());
  }
  for (const TokenLogprobs& entry : generated)
    ids.push_back(entry.token.id);

  Open(*group, 1, ids, ids.size(), kTop);
  const std::vector<TokenLogprobs> of_prompt = Prefill(*group, 1, ids.size(), 40);
  ASSERT_EQ(of_prompt.size(), ids.size() - 1);
  const auto from = of_prompt.begin() + static_cast<ptrdiff_t>(prompt.size()) - 1;
  ExpectSame(std::vector<TokenLogprobs>(from, of_prompt.end()), generated, "generated");

  // After a preemption the emitted tokens come with the prompt; only the prompt's are reported.
  Open(*group, 2, ids, prompt.size(), kTop);
  ExpectSame(Prefill(*group, 2, ids.size(), 40),
             std::vector<TokenLogprobs>(of_prompt.begin(), from), "opened again");
}

}  // namespace
}  // namespace twinspark::invariance
