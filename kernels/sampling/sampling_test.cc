// Keyed noise against the published Philox answers; choices against the definitions written out in
// double; order of the processing steps; penalties with drafted tokens on top; logprobs; bad rows.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/sampling/choose_tokens.h"
#include "kernels/sampling/keyed_noise.h"
#include "kernels/testing/op_fixture.h"

namespace twinspark {
namespace {

using Words = std::array<uint32_t, 4>;

TEST(Philox, KnownAnswersOfTheRandom123Distribution) {
  EXPECT_EQ(Philox4x32({0, 0, 0, 0}, {0, 0}),
            (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  const uint32_t ones = 0xffffffff;
  EXPECT_EQ(Philox4x32({ones, ones, ones, ones}, {ones, ones}),
            (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Gumbel, BoundsUsedForPruningHold) {
  EXPECT_LT(GumbelFromWord(0xffffffff), 22.9f);
  EXPECT_GT(GumbelFromWord(0xffffffff), 22.8f);
  EXPECT_TRUE(std::isfinite(GumbelFromWord(0)));
}

int32_t Choose(const std::vector<float>& logits, const ChoiceRow& row) {
  OpContext context(1, size_t{1} << 20);
  int32_t token = -2;
  ChooseTokensCpu({.logits = MakeView(logits.data(), 1, static_cast<int64_t>(logits.size())),
                   .rows = &row,
                   .tokens = &token},
                  context.launch());
  return token;
}

// The specification's definition of the kept set, sorted in full.
std::vector<int32_t> NaiveKept(const std::vector<float>& logits, const ChoiceRow& row) {
  std::vector<std::pair<float, int32_t>> list;
  float largest = -HUGE_VALF;
  for (const float l : logits)
    largest = std::max(largest, l / row.temperature);
  for (size_t v = 0; v < logits.size(); ++v) {
    const float l = logits[v] / row.temperature;
    if (row.min_p > 0 && l < largest + std::log(row.min_p)) continue;
    list.emplace_back(l, static_cast<int32_t>(v));
  }
  std::stable_sort(list.begin(), list.end(),
                   [](const auto& a, const auto& b) { return a.first > b.first; });
  if (row.top_k > 0 && static_cast<size_t>(row.top_k) < list.size())
    list.resize(static_cast<size_t>(row.top_k));
  if (row.top_p < 1) {
    double total = 0, sum = 0;
    for (const auto& [l, v] : list)
      total += std::exp(static_cast<double>(l) - static_cast<double>(largest));
    size_t keep = 0;
    while (keep < list.size()) {
      sum += std::exp(static_cast<double>(list[keep++].first) - static_cast<double>(largest));
      if (sum >= static_cast<double>(row.top_p) * total) break;
    }
    list.resize(keep);
  }
  std::vector<int32_t> ids;
  for (const auto& [l, v] : list)
    ids.push_back(v);
  std::sort(ids.begin(), ids.end());
  return ids;
}

int32_t NaiveDraw(const std::vector<float>& logits, const ChoiceRow& row) {
  float best = -HUGE_VALF;
  int32_t token = -1;
  for (const int32_t v : NaiveKept(logits, row)) {
    const float value =
        logits[static_cast<size_t>(v)] / row.temperature +
        GumbelFromWord(NoiseWord({row.seed, row.position, row.choice}, static_cast<uint32_t>(v)));
    if (value > best) {
      best = value;
      token = v;
    }
  }
  return token;
}

TEST(ChooseTokens, FiltersAndDrawFollowTheDefinition) {
  RandomTensor random(101);
  for (int i = 0; i < 600; ++i) {
    std::vector<float> logits;
    const int64_t vocab = 1 + random.Below(300);
    const float spread = random.Uniform(0.1f, 30.0f);
    for (int64_t v = 0; v < vocab; ++v) {
      const float l = random.Normal() * spread;
      logits.push_back(i % 4 == 0 ? std::round(l) : l);  // a quarter with many ties, -0 among them
    }
    ChoiceRow row;
    row.temperature = random.Uniform(0.1f, 2.0f);
    row.min_p = random.Below(3) == 0 ? random.Uniform(0.0f, 0.3f) : 0.0f;
    row.top_k = random.Below(3) == 0 ? static_cast<int>(random.Below(40)) : 0;
    row.top_p = random.Below(3) == 0 ? 1.0f : random.Uniform(0.05f, 1.0f);
    row.seed = random.Bits();
    row.position = static_cast<uint32_t>(random.Below(1 << 20));
    row.choice = static_cast<uint32_t>(random.Below(4));
    EXPECT_EQ(KeptTokens(logits.data(), vocab, row), NaiveKept(logits, row)) << i;
    EXPECT_EQ(Choose(logits, row), NaiveDraw(logits, row)) << i;
  }
}

TEST(ChooseTokens, GreedyTakesTheLowestIdOfTheLargest) {
  OpContext context(2);
  OnEverySimdTarget([&] {
    RandomTensor random(102);
    for (const int64_t vocab : {1, 5, 16, 100, 1031}) {
      std::vector<float> logits(static_cast<size_t>(vocab), -3.0f);
      const int64_t first = random.Below(vocab);
      for (int64_t v = first; v < vocab; v += 3)
        logits[static_cast<size_t>(v)] = 2.0f;
      EXPECT_EQ(Choose(logits, {}), first);
      int32_t token = -2;
      ArgmaxCpu({.logits = MakeView(static_cast<const float*>(logits.data()), 1, vocab),
                 .tokens = &token},
                context.launch());
      EXPECT_EQ(token, first);
    }
  });
}

TEST(ChooseTokens, FrequenciesMatchTheDistribution) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.15f),
                                     std::log(0.05f)};
  std::map<int32_t, int> counts;
  constexpr int kDraws = 4000;
  for (int i = 0; i < kDraws; ++i) {
    ChoiceRow row;
    row.temperature = 1;
    row.seed = 7;
    row.position = static_cast<uint32_t>(i);
    ++counts[Choose(logits, row)];
  }
  // Four standard deviations are 0.032 at most; the seed is fixed.
  EXPECT_NEAR(counts[0] / static_cast<double>(kDraws), 0.5, 0.032);
  EXPECT_NEAR(counts[1] / static_cast<double>(kDraws), 0.3, 0.03);
  EXPECT_NEAR(counts[3] / static_cast<double>(kDraws), 0.05, 0.014);
}

TEST(ChooseTokens, MasksBansBiasesAndPenaltiesInOrder) {
  const std::vector<float> logits = {5, 4, 3, 2, 1, -1};
  const uint8_t allowed = 0x3e, grammar = 0x3c;  // not 0; not 0 and 1
  const int32_t banned[] = {2};
  const LogitBias biases[] = {{5, 2.5f}, {0, 100}, {99, 1}};  // 5: 1.5; masked stays masked
  ChoiceRow row;
  row.allowed_mask = &allowed;
  EXPECT_EQ(Choose(logits, row), 1);
  row.grammar_mask = &grammar;
  EXPECT_EQ(Choose(logits, row), 2);
  row.banned_ids = banned;
  row.num_banned = 1;
  EXPECT_EQ(Choose(logits, row), 3);
  row.biases = biases;
  row.num_biases = 3;
  EXPECT_EQ(Choose(logits, row), 3);
  const TokenCount counts[] = {{3, 1, 0}, {4, 0, 2}};
  row.counts = counts;
  row.num_counts = 2;
  row.repetition_penalty = 2;  // 3: 1, 4: 0.5, 5: 1.5
  EXPECT_EQ(Choose(logits, row), 5);
  const int32_t drafted[] = {5, 5};
  row.drafted = drafted;
  row.num_drafted = 2;  // 5: 0.75
  EXPECT_EQ(Choose(logits, row), 3);
  row.repetition_penalty = 1;
  row.frequency_penalty = 1;  // 3: 2, 4: -1, 5: -0.5
  EXPECT_EQ(Choose(logits, row), 3);
  const uint8_t only_4_and_5 = 0x30;
  row.grammar_mask = &only_4_and_5;
  EXPECT_EQ(Choose(logits, row), 5);
  row.frequency_penalty = 0;
  row.presence_penalty = -3;  // both generated: 4: 4, 5: 4.5
  EXPECT_EQ(Choose(logits, row), 5);
  const uint8_t none = 0;
  row.grammar_mask = &none;
  EXPECT_EQ(Choose(logits, row), -1);
}

TEST(ChooseTokens, NegativeLogitsAreMultipliedByTheRepetitionPenalty) {
  const std::vector<float> logits = {-1.0f, -1.5f};
  const TokenCount counts[] = {{0, 1, 0}};
  ChoiceRow row;
  row.counts = counts;
  row.num_counts = 1;
  row.repetition_penalty = 2;
  EXPECT_EQ(Choose(logits, row), 1);
}

// The smallest penalty that a request may ask for: what was there is all but certain to come again,
// and nothing becomes infinite.
TEST(ChooseTokens, ATinyRepetitionPenaltyStaysFinite) {
  const std::vector<float> logits = {3, 20, -5, 19};
  const TokenCount counts[] = {{0, 1, 0}, {3, 0, 2}, {2, 1, 0}};
  ChoiceRow row;
  row.counts = counts;
  row.num_counts = 3;
  row.repetition_penalty = std::numeric_limits<float>::min();
  EXPECT_EQ(Choose(logits, row), 0) << "both are as large as it goes; the lowest id";
  for (const float temperature : {1e-5f, 1.0f, 2.0f}) {
    row.temperature = temperature;
    row.top_p = 0.9f;
    const int32_t drawn = Choose(logits, row);
    EXPECT_TRUE(drawn == 0 || drawn == 3) << drawn << " at " << temperature;
  }
}

TEST(ChooseTokens, LogprobsAreOfTheRawLogits) {
  RandomTensor random(103);
  constexpr int64_t kVocab = 50;
  std::vector<float> logits = random.NormalF32(kVocab, 4.0f);
  logits[7] = logits[9] = 20;
  const uint8_t mask[7] = {0x01};
  ChoiceRow row;
  row.allowed_mask = mask;
  row.num_logprobs = 3;
  int32_t token = -2, ids[5] = {};
  float logprobs[5] = {};
  OpContext context(1);
  ChooseTokensCpu({.logits = MakeView(static_cast<const float*>(logits.data()), 1, kVocab),
                   .rows = &row,
                   .tokens = &token,
                   .logprob_ids = ids,
                   .logprobs = logprobs,
                   .logprob_stride = 5},
                  context.launch());
  double sum = 0;
  for (const float l : logits)
    sum += std::exp(static_cast<double>(l));
  EXPECT_EQ(token, 0);
  EXPECT_EQ(ids[0], 0);
  EXPECT_NEAR(logprobs[0], static_cast<double>(logits[0]) - std::log(sum), 1e-5);
  EXPECT_EQ(ids[1], 7);
  EXPECT_EQ(ids[2], 9);
  EXPECT_NEAR(logprobs[2], 20 - std::log(sum), 1e-5);
  EXPECT_LE(logprobs[3], logprobs[2]);
}

TEST(ChooseTokens, RanksCountWhatIsMoreLikely) {
  RandomTensor random(104);
  constexpr int64_t kVocab = 60;
  std::vector<float> logits = random.NormalF32(kVocab, 3.0f);
  for (float& l : logits)
    l = std::round(l);  // many ties: the lower id goes first
  std::vector<int32_t> order(kVocab);
  for (int32_t v = 0; v < kVocab; ++v)
    order[static_cast<size_t>(v)] = v;
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return logits[static_cast<size_t>(a)] > logits[static_cast<size_t>(b)];
  });
  OpContext context(1);
  for (int32_t rank = 1; rank <= kVocab; ++rank) {
    ChoiceRow row;
    row.given_token = order[static_cast<size_t>(rank) - 1];
    row.temperature = 1;
    row.num_logprobs = 20;
    int32_t token = -2, ids[21] = {}, found = 0;
    float logprobs[21] = {};
    ChooseTokensCpu({.logits = MakeView(static_cast<const float*>(logits.data()), 1, kVocab),
                     .rows = &row,
                     .tokens = &token,
                     .logprob_ids = ids,
                     .logprobs = logprobs,
                     .logprob_stride = 21,
                     .logprob_ranks = &found},
                    context.launch());
    EXPECT_EQ(token, row.given_token) << "nothing is drawn";
    EXPECT_EQ(ids[0], row.given_token);
    EXPECT_EQ(found, rank);
    if (rank > 20) continue;
    EXPECT_EQ(ids[rank], row.given_token) << "its place in the list";
    EXPECT_EQ(logprobs[rank], logprobs[0]);
  }
}

TEST(ChooseTokens, NonFiniteRowsAreFlaggedAndOthersUntouched) {
  constexpr int64_t kVocab = 37;
  OnEverySimdTarget([&] {
    for (const float bad : {std::nanf(""), HUGE_VALF, -HUGE_VALF}) {
      for (const int64_t where : {0, 20, 36}) {
        std::vector<float> logits(3 * kVocab, 0.5f);
        logits[static_cast<size_t>(kVocab + where)] = bad;
        const ChoiceRow rows[3];
        int32_t tokens[3];
        uint8_t flags[3];
        OpContext context(3, size_t{1} << 20);
        ChooseTokensCpu({.logits = MakeView(static_cast<const float*>(logits.data()), 3, kVocab),
                         .rows = rows,
                         .tokens = tokens,
                         .non_finite = flags},
                        context.launch());
        EXPECT_EQ(std::vector<int>(flags, flags + 3), (std::vector<int>{0, 1, 0}));
        EXPECT_EQ(std::vector<int32_t>(tokens, tokens + 3), (std::vector<int32_t>{0, -1, 0}));
      }
    }
  });
}

TEST(JoinSlices, PutsTheRanksSideBySide) {
  OpContext context(1);
  const std::vector<float> parts = {1, 2, 3, 4, 5, 6, 7, 8};  // 2 ranks, 2 rows, slices of 2
  Matrix out(2, 4, DType::kF32);
  JoinSlicesCpu({.parts = MakeView(parts.data(), 4, 2), .num_ranks = 2, .out = out.view()},
                context.launch());
  EXPECT_EQ(out.Values(), (std::vector<float>{1, 2, 5, 6, 3, 4, 7, 8}));
}

}  // namespace
}  // namespace twinspark
