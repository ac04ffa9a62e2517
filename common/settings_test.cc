// Precedence, types, ranges and error texts of settings.h; the example file in deploy is the
// generated one.
#include "common/settings.h"

#include <fstream>
#include <sstream>

#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace twinspark {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

Settings::Environment Env(std::map<std::string, std::string> values) {
  return [values](const std::string& key) -> std::optional<std::string> {
    const auto found = values.find(key);
    return found == values.end() ? std::nullopt : std::optional<std::string>(found->second);
  };
}

absl::StatusOr<Settings> Parse(std::vector<const char*> flags,
                               std::map<std::string, std::string> environment = {}) {
  return Settings::Parse(kGateway, flags, Env(std::move(environment)));
}

class SettingsFile {
 public:
  explicit SettingsFile(const std::string& text)
      : path_(::testing::TempDir() + "settings_" + std::to_string(getpid())) {
    std::ofstream(path_) << text;
  }
  ~SettingsFile() { unlink(path_.c_str()); }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

TEST(SettingsTest, FlagBeatsEnvironmentBeatsFileBeatsDefault) {
  const SettingsFile file("# comment\nPORT=1\nMAX_NUM_SEQS = \"2\"\nDSPARK_TOKENS=5\n");
  auto settings = Parse({"--port", "3", "--config", file.path().c_str()},
                        {{"PORT", "2"}, {"MAX_NUM_SEQS", "4"}, {"DSPARK_TOKENS", ""}});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_EQ(settings->Int("PORT"), 3);
  EXPECT_EQ(settings->Source("PORT"), "flag");
  EXPECT_EQ(settings->Int("MAX_NUM_SEQS"), 4);
  EXPECT_EQ(settings->Source("MAX_NUM_SEQS"), "environment");
  EXPECT_EQ(settings->Int("DSPARK_TOKENS"), 5) << "an empty environment variable is unset";
  EXPECT_EQ(settings->Source("DSPARK_TOKENS"), "file");
  EXPECT_EQ(settings->Source("MAX_OUTPUT_DEFAULT"), "default");
}

TEST(SettingsTest, ListsAreTrimmed) {
  auto settings = Parse({"--workers=a:1, b:2,"});
  ASSERT_TRUE(settings.ok()) << settings.status();
  EXPECT_THAT(settings->List("WORKERS"), ElementsAre("a:1", "b:2"));
}

TEST(SettingsTest, ErrorsNameKeyValueSourceAndRange) {
  for (const char* bad : {"65536", "-1", "80x", "1e3", "999999999999999999999"}) {
    auto settings = Parse({}, {{"PORT", bad}});
    ASSERT_FALSE(settings.ok()) << bad;
    EXPECT_THAT(std::string(settings.status().message()),
                HasSubstr("PORT='" + std::string(bad) + "' (from environment)"));
    EXPECT_THAT(std::string(settings.status().message()), HasSubstr("0 to 65535"));
  }
  auto infinite = Parse({"--drain-seconds", "inf"});
  EXPECT_FALSE(infinite.ok());
}

TEST(SettingsTest, ChoicesAreNamed) {
  EXPECT_EQ(Parse({"--log-level", "loud"}).status().message(),
            "LOG_LEVEL='loud' (from flag): expected debug, info, warning, error");
  EXPECT_TRUE(Parse({"--log-level", "error"}).ok());
  EXPECT_FALSE(Settings::Parse(kEngramService, {}, Env({{"ENGRAM_IO", "urin"}})).ok());
}

TEST(SettingsTest, WhatWasGivenIsDescribed) {
  EXPECT_EQ(Parse({})->DescribeGiven(), "none, all are defaults");
  EXPECT_EQ(Parse({"--run-ahead", "0"}, {{"PORT", "8899"}})->DescribeGiven(),
            "PORT=8899 (environment) RUN_AHEAD=0 (flag)");
}

TEST(SettingsTest, UnknownFlagsAndFileKeysAreRefused) {
  EXPECT_THAT(std::string(Parse({"--prot", "1"}).status().message()), HasSubstr("--prot"));
  EXPECT_THAT(std::string(Parse({"stray"}).status().message()), HasSubstr("stray"));
  EXPECT_THAT(std::string(Parse({"--port"}).status().message()), HasSubstr("needs a value"));
  EXPECT_FALSE(Parse({"--worker-listen", "x"}).ok()) << "a worker's flag is not the gateway's";
  const SettingsFile file("PORT=1\nPROT=2\n");
  EXPECT_THAT(std::string(Parse({"--config", file.path().c_str()}).status().message()),
              HasSubstr(":2: 'PROT=2'"));
  const SettingsFile shared("WORKER_LISTEN=h:1\n");
  EXPECT_TRUE(Parse({"--config", shared.path().c_str()}).ok()) << "one file serves every program";
  EXPECT_THAT(std::string(Parse({"--config", "/no/such/file"}).status().message()),
              HasSubstr("/no/such/file"));
}

TEST(SettingsTest, DefaultsAreValidForEveryProgram) {
  for (Program program : {kGateway, kShardWorker, kEngramService}) {
    auto settings = Settings::Parse(program, {}, Env({}));
    EXPECT_TRUE(settings.ok()) << settings.status();
    EXPECT_THAT(SettingsHelp(program), HasSubstr("--lifeline-fd"));
  }
}

TEST(SettingsTest, ExampleFileIsTheGeneratedOne) {
  std::ifstream file(TWINSPARK_SOURCE_DIR "/deploy/.env.example");
  std::stringstream content;
  content << file.rdbuf();
  EXPECT_EQ(content.str(), SettingsExampleFile())
      << "run: build/release/bin/gateway --print-example > deploy/.env.example";
}

}  // namespace
}  // namespace twinspark
