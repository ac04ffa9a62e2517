// The cost model: it learns what ops take and sizes chunks by it.
#include "gateway/scheduler/step_cost.h"

#include <gtest/gtest.h>

namespace twinspark::gateway {
namespace {

TEST(StepCost, LearnsPrefillAndSizesChunks) {
  StepCost cost;
  const int careful = cost.PrefillRowsWithin(250);
  EXPECT_LE(careful, 256);
  cost.Learn(0, 128, 64);  // 0.5 ms a row: the first measurement replaces the guess
  EXPECT_DOUBLE_EQ(cost.PredictMs(0, 100), 50);
  EXPECT_EQ(cost.PrefillRowsWithin(250), 448);  // whole pages
  for (int i = 0; i < 50; ++i)
    cost.Learn(0, 448, 448);
  EXPECT_NEAR(cost.PredictMs(0, 100), 100, 1);
  EXPECT_EQ(cost.PrefillRowsWithin(1), 64);  // never less than a page
}

TEST(StepCost, RoundsUseTheNearestSizeSeen) {
  StepCost cost;
  EXPECT_DOUBLE_EQ(cost.PredictMs(4, 0), StepCost::kFirstRoundMs);
  cost.Learn(4, 0, 8);
  EXPECT_DOUBLE_EQ(cost.PredictMs(4, 0), 8);
  EXPECT_DOUBLE_EQ(cost.PredictMs(8, 0), 16);
  EXPECT_DOUBLE_EQ(cost.PredictMs(1, 0), 8);
  EXPECT_DOUBLE_EQ(cost.PredictMs(0, 0), 0);
}

TEST(StepCost, MixedOpsTeachPrefill) {
  StepCost cost;
  cost.Preset(false, 4, 10);
  cost.Learn(4, 100, 60);
  EXPECT_DOUBLE_EQ(cost.PredictMs(0, 100), 50);
}

}  // namespace
}  // namespace twinspark::gateway
