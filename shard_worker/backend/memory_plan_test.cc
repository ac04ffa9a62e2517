// The plan for the demo model's shape: defaults, what was asked for, a budget that limits pages,
// and one that is too small (with need, have and the settings in the text).
#include "shard_worker/backend/memory_plan.h"

#include <string>
#include <utility>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/check.h"

namespace twinspark {
namespace {

using ::testing::HasSubstr;

ModelConfig DemoConfig() {
  absl::StatusOr<ModelConfig> config = LoadModelConfig(TWINSPARK_DEMO_MODEL);
  CHECK(config.ok()) << config.status().ToString();
  return *std::move(config);
}

TEST(MemoryPlanTest, DefaultsCoverEverySlotsContextUpToACap) {
  const ModelConfig config = DemoConfig();
  const auto plan = PlanMemory(config, uint64_t{1} << 20, {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->granted.max_context, config.max_position_embeddings);
  EXPECT_EQ(plan->granted.num_slots, 8);
  EXPECT_EQ(plan->granted.num_pages, 2048);
  EXPECT_EQ(plan->pages_bytes, 2048 * plan->bytes_per_page);
  EXPECT_EQ(plan->rings_bytes, 8 * plan->bytes_per_slot);
  // Ratios 2, 2 and 1: 32 + 32 + 64 rows a page, each 288 + 68 bytes.
  EXPECT_EQ(plan->bytes_per_page, 128u * (288 + 68));
}

TEST(MemoryPlanTest, WhatWasAskedForIsGranted) {
  MemoryRequest request;
  request.wanted.num_slots = 2;
  request.wanted.num_pages = 10;
  request.wanted.max_context = 1000;
  request.numerics = Numerics::kF32;
  const auto plan = PlanMemory(DemoConfig(), 0, request);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->granted.num_slots, 2);
  EXPECT_EQ(plan->granted.num_pages, 10);
  EXPECT_EQ(plan->granted.max_context, 1000);
  EXPECT_EQ(plan->bytes_per_page, 128u * 4 * (512 + 128)) << "f32 rows are not packed";
}

TEST(MemoryPlanTest, BudgetLimitsPagesThatWereLeftOpen) {
  const ModelConfig config = DemoConfig();
  const MemoryPlan all = *PlanMemory(config, 1000, {});
  MemoryRequest request;
  request.budget_bytes = all.total_bytes() - all.pages_bytes + 100 * all.bytes_per_page;
  const auto plan = PlanMemory(config, 1000, request);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(plan->granted.num_pages, 100);
  EXPECT_LE(plan->total_bytes(), request.budget_bytes);
  request.wanted.num_pages = 101;
  EXPECT_EQ(PlanMemory(config, 1000, request).status().code(),
            absl::StatusCode::kResourceExhausted);
}

TEST(MemoryPlanTest, TooLittleSaysNeedHaveAndKnob) {
  MemoryRequest request;
  request.budget_bytes = uint64_t{1} << 30;
  const auto plan = PlanMemory(DemoConfig(), uint64_t{2} << 30, request);
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kResourceExhausted);
  const std::string text(plan.status().message());
  EXPECT_THAT(text, HasSubstr("need 2."));
  EXPECT_THAT(text, HasSubstr("have 1.00 GiB"));
  EXPECT_THAT(text, HasSubstr("KV_PAGES"));
  EXPECT_THAT(text, HasSubstr("MEMORY_BUDGET_GIB"));
}

TEST(MemoryPlanTest, HostMemoryIsRead) {
  const HostMemory memory = ReadHostMemory();
  EXPECT_GT(memory.total_bytes, memory.available_bytes);
  EXPECT_GT(memory.available_bytes, 0u);
}

}  // namespace
}  // namespace twinspark
