// What settings quickstart takes, refuses and compares (given_settings.h).
#include "deploy/local_cluster/given_settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace twinspark {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Settings With(const std::string& key, const std::string& value) {
  return *Settings::Parse(kEveryProgram, {}, [&](const std::string& asked) {
    return asked == key ? std::optional<std::string>(value) : std::nullopt;
  });
}

TEST(GivenSettingsTest, DifferencesAreNamedInBothDirections) {
  const SettingsInForce a = {{"KV_PAGES", "8"}, {"LOG_LEVEL", "debug"}, {"RUN_AHEAD", "0"}};
  const SettingsInForce b = {{"KV_PAGES", "9"}, {"LOG_LEVEL", "debug"}, {"DSPARK_TOKENS", "0"}};
  EXPECT_THAT(DifferentKeys(a, a), IsEmpty());
  EXPECT_THAT(DifferentKeys(a, b), ElementsAre("DSPARK_TOKENS", "KV_PAGES", "RUN_AHEAD"));
  EXPECT_EQ(DifferentKeys(b, a), DifferentKeys(a, b));
}

TEST(GivenSettingsTest, MetricsPortsFollowTheGateways) {
  EXPECT_THAT(MetricsFlags("", 3), IsEmpty());
  EXPECT_THAT(MetricsFlags("h:9000", 0), ElementsAre("--metrics-addr", "h:9000"));
  EXPECT_THAT(MetricsFlags("[::1]:9000", 4), ElementsAre("--metrics-addr", "[::1]:9004"));
  EXPECT_THAT(MetricsFlags("h:0", 4), ElementsAre("--metrics-addr", "h:0"));
  EXPECT_TRUE(CheckGivenSettings(With("METRICS_ADDR", "h:65533"), 1).ok());
  EXPECT_THAT(std::string(CheckGivenSettings(With("METRICS_ADDR", "h:65533"), 2).message()),
              AllOf(HasSubstr("METRICS_ADDR='h:65533'"), HasSubstr("1 to 65531")));
}

TEST(GivenSettingsTest, RefusesByNameWhatEachPartIsToldOnItsOwn) {
  EXPECT_TRUE(CheckGivenSettings(With("MAX_NUM_SEQS", "4"), 2).ok());
  for (const char* key : {"WORKERS", "ENGRAM_SOCKET", "PORT_FILE"}) {
    EXPECT_THAT(std::string(CheckGivenSettings(With(key, "h:1"), 2).message()), HasSubstr(key));
  }
}

}  // namespace
}  // namespace twinspark
