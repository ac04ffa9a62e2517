// Goal: /status is JSON that people can read too: whole numbers without a fraction, no exponents.
#include "gateway/engine/engine_status.h"

#include <boost/json.hpp>

#include <gtest/gtest.h>

namespace twinspark::gateway {
namespace {

TEST(EngineStatus, NumbersAreWrittenOut) {
  EngineStatus status;
  status.state = EngineState::kReady;
  status.state_age_s = 24.0;
  status.uptime_s = 1234567.25;
  status.num_drafted = 3;
  status.num_accepted = 2;
  status.num_ops = 12345678901234;
  status.last_epoch_end = "a \"quoted\" reason, [1, {2";
  WorkerStatus worker;
  worker.progress = 1.0;
  worker.last_op_age_s = -0.0001;
  worker.memory_bytes = {{"weights", 106420000000}, {"pages", 0}};
  worker.engram.is_overloaded = true;
  status.workers = {worker, worker};
  const std::string text = EngineStatusJson(status);
  for (const char* part : {"\"since_s\":24,", "\"uptime_s\":1234567.25,", "\"acceptance\":0.667}",
                           "\"ops\":12345678901234,", "\"progress\":1,", "\"last_op_age_s\":0,",
                           "\"weights\":106420000000,\"pages\":0}", "\"overloaded\":true"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
  const boost::json::value read = boost::json::parse(text);
  EXPECT_EQ(read.at("last_epoch_end").as_string(), status.last_epoch_end);
  EXPECT_EQ(read.at("workers").as_array().size(), 2u);
  EXPECT_NE(EngineHealthJson(status).find("\"since_s\":24}"), std::string::npos);
}

}  // namespace
}  // namespace twinspark::gateway
