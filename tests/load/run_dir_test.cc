// Goal: the gateway's address comes from the run folder, in a form that this machine can call, and
// a folder that is none says which file is wrong. Method: folders written here.
#include "tests/load/run_dir.h"

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include <gtest/gtest.h>

namespace twinspark {
namespace {

class RunDirTest : public ::testing::Test {
 protected:
  RunDirTest() { std::filesystem::create_directories(dir_); }
  ~RunDirTest() override { std::filesystem::remove_all(dir_); }

  void Write(const std::string& name, const std::string& text) {
    std::ofstream(absl::StrCat(dir_, "/", name)) << text;
  }

  const std::string dir_ = ::testing::TempDir() + "/run_dir_test";
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
    const auto run = ReadRunDir(dir_);
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_EQ(run->url, url);
    EXPECT_EQ(run->supervisor, 4711);
  }
}

TEST_F(RunDirTest, WhatIsMissingIsNamed) {
  EXPECT_TRUE(absl::StrContains(ReadRunDir(dir_).status().message(), "cluster.json"));
  Write("cluster.json", R"({"port":1})");
  EXPECT_TRUE(absl::StrContains(ReadRunDir(dir_).status().message(), "supervisor_pid"));
  Write("cluster.json", R"({"supervisor_pid":4711})");
  EXPECT_TRUE(absl::StrContains(ReadRunDir(dir_).status().message(), "gateway.port"));
  Write("gateway.port", "8888");
  EXPECT_TRUE(absl::StrContains(ReadRunDir(dir_).status().message(), "'8888'"));
}

}  // namespace
}  // namespace twinspark
