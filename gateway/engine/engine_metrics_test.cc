// The catalogue of metrics in README.md against the code: every series that the engine makes is
// listed there, and nothing is listed that it does not make.
#include "gateway/engine/engine_metrics.h"

#include <regex>
#include <set>
#include <sstream>
#include <string>

#include <gtest/gtest.h>

#include "common/file_util.h"
#include "common/metrics.h"

namespace twinspark::gateway {
namespace {

std::set<std::string> NamesIn(const std::string& text, const std::regex& pattern) {
  std::set<std::string> names;
  for (std::sregex_iterator it(text.begin(), text.end(), pattern), end; it != end; ++it) {
    names.insert((*it)[1]);
  }
  return names;
}

TEST(EngineMetrics, CatalogueAndCodeAgree) {
  Metrics metrics;
  EngineMetrics engine(metrics, "model", "build");
  engine.OnRejected("draining");
  engine.OnEpochEnd("silent");
  EngineStatus status;
  status.workers.resize(1);
  status.workers[0].memory_bytes = {{"weights", 1}};
  engine.Publish(status, SchedulerCounters());
  const std::set<std::string> made =
      NamesIn(metrics.Text(), std::regex("# TYPE ([A-Za-z_:0-9]+) "));

  const auto readme =
      ReadFile(std::string(TWINSPARK_SOURCE_DIR) + "/gateway/engine/README.md", 1 << 20);
  ASSERT_TRUE(readme.ok()) << readme.status().ToString();
  const std::set<std::string> listed = NamesIn(*readme, std::regex("`((dsv_|vllm:)[a-z_0-9]+)`"));
  EXPECT_EQ(made, listed);
}

TEST(EngineMetrics, CountersFollowTheScheduler) {
  Metrics metrics;
  EngineMetrics engine(metrics, "model", "build");
  SchedulerCounters counters;
  counters.num_drafted = 7;
  engine.Publish(EngineStatus(), counters);
  engine.Publish(EngineStatus(), counters);
  EXPECT_NE(metrics.Text().find("dsv_spec_drafted_tokens_total 7"), std::string::npos);
}

}  // namespace
}  // namespace twinspark::gateway
