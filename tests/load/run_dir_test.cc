// Goal: the gateway's address comes from the run folder, in a form that this machine can call, and
// a folder that is none says which file is wrong. Method: folders written here.
#include "tests/load/run_dir.h"

#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include <gtest/gtest.h>

#include "common/testing/temp_dir.h"

namespace twinspark {
namespace {

class RunDirTest : public ::testing::Test {
 protected:
  void Write(const std::string& name, const std::string& text) {
    std::ofstream(dir_ / name) << text;
  }

  const TempDir dir_;
};

TEST_F(RunDirTest, AddressesThatCanBeCalled) {
  Write("cluster.json", R"({"supervisor_pid":4711,"port":1})");
  const std::pair<const char*, const char*> cases[] = {
      {"127.0.0.1:9001\n", "http://127.0.0.1:9001"},
      {"0.0.0.0:9002", "http://127.0.0.1:9002"},
      {"192.0.2.7:9003", "http://192.0.2.7:9003"},
      {":::9004", "http://[::1]:9004"},
      {"::1:9005", "http://[::1]:9005"},
  };
  for (const auto& [address, url] : cases) {
    Write("gateway.port", address);
    const auto run = ReadRunDir(dir_.path());
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_EQ(run->url, url);
    EXPECT_EQ(run->supervisor, 4711);
  }
}

TEST_F(RunDirTest, WhatIsMissingIsNamed) {
  EXPECT_TRUE(absl::StrContains(ReadRunDir(dir_.path()).status().message(), "cluster.json"));
  Write("cluster.json", R"({"port":1})");
  EXPECT_TRUE(absl::StrContains(ReadRunDir(dir_.path()).status().message(), "supervisor_pid"));
  Write("cluster.json", R"({"supervisor_pid":4711})");
  EXPECT_TRUE(absl::StrContains(ReadRunDir(dir_.path()).status().message(), "gateway.port"));
  Write("gateway.port", "8888");
  EXPECT_TRUE(absl::StrContains(ReadRunDir(dir_.path()).status().message(), "'8888'"));
}

}  // namespace
}  // namespace twinspark
