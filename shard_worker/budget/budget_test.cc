// The released pack's published figures come out of its configuration and K map; the demo pack's
// headers give its file sizes.
#include "shard_worker/budget/budget.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/file_util.h"

namespace twinspark {
namespace {

constexpr double kGiB = 1073741824.0;
const std::string kReleased = TWINSPARK_SOURCE_DIR "/tests/golden/data/released";
const std::string kDemo = TWINSPARK_SOURCE_DIR "/deploy/demo_model";

Budget Released(int world) {
  const ModelConfig config = *LoadModelConfig(kReleased);
  const VisionShape vision = *ParseVisionShape(*ReadFile(kReleased + "/config.json", 1 << 20));
  const KMap map = *ParseKMap(*ReadFile(kReleased + "/k_map_2.9bpw.json", 1 << 20), "k_map");
  return ComputeBudget(config, *InventoryFromKMap(config, vision, map), world);
}

TEST(BudgetTest, ReleasedPackMatchesThePublishedCounts) {
  const Budget budget = Released(2);
  EXPECT_EQ(budget.total.num_matrices, 47900);
  EXPECT_EQ(budget.total.num_natives, 852);
  EXPECT_EQ(budget.num_tensors, 192452);
  EXPECT_NEAR(static_cast<double>(budget.total.total_bytes) / 1e9, 210.58, 0.01);
  EXPECT_NEAR(static_cast<double>(budget.total.kit_bytes) / kGiB, 99.5, 0.1);
  EXPECT_NEAR(static_cast<double>(budget.total.held_bytes) / kGiB, 99.10, 0.02);
  EXPECT_DOUBLE_EQ(budget.kv_bytes_per_token, 890);
}

TEST(BudgetTest, PartsOfTheReleasedPack) {
  const Budget budget = Released(2);
  const std::vector<std::pair<double, double>> kit_and_held = {
      {91.29, 91.51}, {0.37, 0.37}, {2.11, 1.62}, {0.15, 0.15}, {0.15, 0.15}, {0.17, 0.08},
      {0.62, 0.62},   {0.23, 0.23}, {3.17, 3.18}, {0.32, 0.29}, {0.90, 0.90}};
  ASSERT_EQ(budget.parts.size(), kit_and_held.size());
  for (size_t i = 0; i < kit_and_held.size(); ++i) {
    EXPECT_NEAR(static_cast<double>(budget.parts[i].kit_bytes) / kGiB, kit_and_held[i].first, 0.006)
        << budget.parts[i].name;
    EXPECT_NEAR(static_cast<double>(budget.parts[i].held_bytes) / kGiB, kit_and_held[i].second,
                0.006)
        << budget.parts[i].name;
  }
  EXPECT_NEAR(budget.parts[0].bits_per_weight(), 2.875, 0.001);
}

TEST(BudgetTest, OneRankHoldsEverything) {
  const Budget budget = Released(1);
  EXPECT_EQ(budget.total.held_bytes, budget.total.total_bytes);
}

TEST(BudgetTest, WhatFits) {
  const Budget budget = Released(2);
  EXPECT_EQ(TokensThatFit(budget, int64_t{50} << 30, 0, 8), 0) << "the weights alone do not fit";
  const int64_t tokens = TokensThatFit(budget, int64_t{110} << 30, int64_t{8} << 30, 8);
  EXPECT_GT(tokens, 1'000'000);
  EXPECT_EQ(tokens % 64, 0);
}

TEST(BudgetTest, DemoPackByItsHeaders) {
  const ModelConfig config = *LoadModelConfig(kDemo);
  const auto items = InventoryFromHeaders(kDemo);
  ASSERT_TRUE(items.ok()) << items.status();
  const Budget budget = ComputeBudget(config, *items, 2);
  EXPECT_LT(budget.total.held_bytes, budget.total.total_bytes);
  EXPECT_GT(budget.total.num_matrices, 200);
  EXPECT_LT(budget.total.total_bytes, 21 << 20) << "without the Engram tables";
}

TEST(KMapTest, ReadsTheKitsSpellingAndFindsItsTwoMistakes) {
  const char* kit =
      R"({"codebook":"mul1","routed":{"0":3},"shared":{"0":5,"29":4},"engram":{"1":5},"attn_default":5,"indexer_wk_bits":8,"mtp_bits":4})";
  const auto map = ParseKMap(kit, "kit");
  ASSERT_TRUE(map.ok()) << map.status();
  EXPECT_EQ(map->BitsOf("layers.0.ffn.experts.7.w2"), 3);
  EXPECT_EQ(map->BitsOf("layers.2.attn.indexer.wk"), 8);
  EXPECT_EQ(map->BitsOf("layers.2.attn.indexer.wq_b"), 5);
  EXPECT_EQ(map->BitsOf("mtp.1.attn.wq_a"), 4);
  EXPECT_EQ(map->BitsOf("head"), 6);
  const std::vector<InventoryItem> stored = {{"layers.29.ffn.shared_experts.w2", 128, 128, 5, 0},
                                             {"layers.0.attn.wkv", 128, 128, 6, 0},
                                             {"layers.0.attn.wq_b", 128, 128, 5, 0}};
  EXPECT_EQ(CompareWithKMap(stored, *map).size(), 2u);
}

TEST(KMapTest, RefusesWhatMakesNoSense) {
  EXPECT_FALSE(ParseKMap("[]", "x").ok());
  EXPECT_FALSE(ParseKMap("{}", "x").ok());
  EXPECT_FALSE(ParseKMap(R"({"routed":{"0":9},"attn_default":5,"mtp_bits":4})", "x").ok());
  EXPECT_FALSE(ParseKMap(R"({"routed":{"a":3},"attn_default":5,"mtp_bits":4})", "x").ok());
}

}  // namespace
}  // namespace twinspark
