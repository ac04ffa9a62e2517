// The catalogue of metrics in README.md against the code: every series that the engine makes is
// listed there, and nothing is listed that it does not make.
#include "gateway/engine/engine_metrics.h"

#include <regex>
#include <set>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
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

// A rate needs a value before the first time, and an alert cannot be tried on a series that is not
// there.
TEST(EngineMetrics, EveryCauseIsThereFromTheStart) {
  Metrics metrics;
  EngineMetrics engine(metrics, "model", "build");
  const std::string text = metrics.Text();
  for (const char* reason :
       {"draining", "not_ready", "too_long", "bad_token", "bad_parameter", "queue_full"}) {
    EXPECT_NE(text.find(absl::StrCat("dsv_requests_rejected_total{reason=\"", reason, "\"} 0\n")),
              std::string::npos)
        << reason << "\n"
        << text;
    engine.OnRejected(reason);
  }
  for (const char* cause :
       {"closed", "silent", "deadline", "op_failed", "divergence", "protocol"}) {
    EXPECT_NE(text.find(absl::StrCat("dsv_epochs_ended_total{cause=\"", cause, "\"} 0\n")),
              std::string::npos)
        << cause << "\n"
        << text;
    engine.OnEpochEnd(cause);
  }
  EXPECT_EQ(metrics.Text().find("dsv_epochs_ended_total{cause=\"silent\"} 0"), std::string::npos);
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
