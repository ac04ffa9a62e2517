// The reporting rules themselves: exit codes, counts and the 1 % allowance.
#include "tests/golden/golden_report.h"

#include <array>
#include <span>

#include <gtest/gtest.h>

namespace twinspark::golden {
namespace {

constexpr Distance kNone = {0.0, 0.0};

TEST(GoldenReport, PassesOnlyWhenEverythingPlannedWasCompared) {
  GoldenReport good;
  good.Plan(2);
  good.Compare("a", kNone, 0.5, 1.0);
  good.Info("b", kNone, "not counted");
  EXPECT_EQ(good.Finish(), kExitPassed);

  GoldenReport missing;
  missing.Plan(3);
  missing.Compare("a", kNone, 0.5, 1.0);
  EXPECT_EQ(missing.Finish(), kExitFailed);
}

TEST(GoldenReport, FailsOnABoundNanNothingPassedForbiddenSkipAndError) {
  GoldenReport over;
  over.Plan(1);
  over.Compare("a", kNone, 1.5, 1.0);
  EXPECT_EQ(over.Finish(), kExitFailed);

  GoldenReport nan;
  nan.Plan(2);
  nan.Compare("a", kNone, 0.0, 1.0);
  nan.Compare("b", kNone, std::nan(""), 1.0);
  EXPECT_EQ(nan.Finish(), kExitFailed);

  GoldenReport nothing;
  nothing.Plan(1);
  nothing.Skip("vision.x", "no vision tower", true);
  EXPECT_EQ(nothing.Finish(), kExitFailed);

  GoldenReport skip;
  skip.Plan(2);
  skip.CompareExact("a", 0, 10);
  skip.Skip("b", "too slow", false);
  EXPECT_EQ(skip.Finish(), kExitFailed);

  GoldenReport error;
  error.Plan(1);
  error.CompareExact("a", 0, 10);
  error.Error("cannot read x");
  EXPECT_EQ(error.Finish(), kExitFailed);

  GoldenReport empty;
  empty.Plan(1);
  empty.CompareExact("nothing compared", 0, 0);
  EXPECT_EQ(empty.Finish(), kExitFailed);
}

TEST(GoldenReport, AllowanceIsOneOrOnePercentAndNeverTwiceTheBound) {
  const auto run = [](int over, int total, double value) {
    GoldenReport report;
    report.Plan(total);
    for (int i = 0; i < total; ++i)
      report.CompareWithAllowance("t", kNone, i < over ? value : 0.5, 1.0);
    return report.Finish();
  };
  EXPECT_EQ(run(1, 10, 1.5), kExitPassed);
  EXPECT_EQ(run(2, 10, 1.5), kExitFailed);
  EXPECT_EQ(run(2, 250, 1.5), kExitPassed);
  EXPECT_EQ(run(3, 250, 1.5), kExitFailed);
  EXPECT_EQ(run(1, 250, 2.5), kExitFailed);
}

TEST(Distance, CountsNanInfinityAndSizes) {
  const std::array<float, 3> want = {3.0f, 4.0f, HUGE_VALF};
  std::array<float, 3> got = want;
  EXPECT_EQ(Distance::Of(std::span<const float>(got), std::span<const float>(want)).max_abs, 0.0);
  got[1] = 4.5f;
  const Distance d = Distance::Of(std::span<const float>(got), std::span<const float>(want));
  EXPECT_DOUBLE_EQ(d.max_abs, 0.5);
  EXPECT_DOUBLE_EQ(d.rel_l2, 0.1);
  got[2] = std::nanf("");
  EXPECT_EQ(Distance::Of(std::span<const float>(got), std::span<const float>(want)).rel_l2,
            HUGE_VAL);
  EXPECT_EQ(
      Distance::Of(std::span<const float>(got).first(2), std::span<const float>(want)).max_abs,
      HUGE_VAL);
}

TEST(GoldenReportTest, HelpIsAskedByItsFlagAlone) {
  const char* const asking[] = {"program", "--dir", "x", "--help"};
  const char* const running[] = {"program", "--dir", "help"};
  EXPECT_TRUE(HelpWasAsked(4, asking, "usage: program\n"));
  EXPECT_FALSE(HelpWasAsked(3, running, "usage: program\n"));
}

}  // namespace
}  // namespace twinspark::golden
