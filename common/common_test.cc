// The small parts of common: API keys, checks, ids, host:port, files, metrics, the lifeline.
#include <fstream>

#include <sys/wait.h>
#include <unistd.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/api_keys.h"
#include "common/check.h"
#include "common/file_util.h"
#include "common/ids.h"
#include "common/lifeline.h"
#include "common/metrics.h"

namespace twinspark {
namespace {

using ::testing::HasSubstr;

TEST(CheckDeathTest, SaysWhatBrokeAndTheValues) {
  EXPECT_DEATH(CHECK_EQ(1 + 1, 3) << "sum", "1 \\+ 1 == 3 \\(2 vs 3\\) sum");
  EXPECT_DEATH(CHECK(false) << 42, "check failed: false 42");
}

TEST(IdsTest, HashIsXxh64) {
  EXPECT_EQ(Hash64(std::string_view("")), 0xef46db3751d8e999u);
  EXPECT_EQ(Hash64(std::string_view("abc")), 0x44bc2cf5ad770999u);
  EXPECT_EQ(Hex16(0xabc), "0000000000000abc");
}

TEST(IdsTest, NewIdsDiffer) {
  const std::string id = NewId("req-");
  EXPECT_EQ(id.size(), 4u + 24u);
  EXPECT_NE(id, NewId("req-"));
}

TEST(FileUtilTest, WritesWholeFilesAndRefusesLargeOnes) {
  const std::string path = ::testing::TempDir() + "file_util_" + std::to_string(getpid());
  EXPECT_EQ(ReadFile(path, 10).status().code(), absl::StatusCode::kNotFound);
  ASSERT_TRUE(WriteFileAtomically(path, "hello").ok());
  EXPECT_EQ(*ReadFile(path, 5), "hello");
  EXPECT_EQ(ReadFile(path, 4).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(WriteFileAtomically("/no/such/dir/x", "hello").ok());
  unlink(path.c_str());
}

TEST(ApiKeysTest, CommentsAndEmptyLinesAreNoKeys) {
  const std::string path = ::testing::TempDir() + "api_keys_" + std::to_string(getpid());
  ASSERT_TRUE(WriteFileAtomically(path, "# team A\n\n first \r\n  # team B\nsec#ond").ok());
  EXPECT_THAT(*ReadApiKeys(path), ::testing::ElementsAre("first", "sec#ond"));
  ASSERT_TRUE(WriteFileAtomically(path, "# only a comment\n\n").ok());
  EXPECT_THAT(std::string(ReadApiKeys(path).status().message()), HasSubstr("holds no key"));
  unlink(path.c_str());
  EXPECT_EQ(ReadApiKeys(path).status().code(), absl::StatusCode::kNotFound);
}

TEST(MetricsTest, SameNameAndLabelsAreOneSeries) {
  Metrics metrics;
  metrics.Counter("dsv_things_total", "Things.", {{"kind", "a"}}).Increment();
  metrics.Counter("dsv_things_total", "Things.", {{"kind", "a"}}).Increment();
  EXPECT_THAT(metrics.Text(), HasSubstr("dsv_things_total{kind=\"a\"} 2"));
  EXPECT_FALSE(metrics.Expose("256.0.0.1:0").ok());
}

TEST(LifelineTest, EndsTheProcessWhenTheOtherEndCloses) {
  int fds[2];
  ASSERT_EQ(pipe(fds), 0);
  const pid_t child = fork();
  if (child == 0) {
    close(fds[1]);
    Lifeline lifeline(fds[0]);
    pause();
    _exit(0);
  }
  close(fds[0]);
  close(fds[1]);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 130);
}

}  // namespace
}  // namespace twinspark
