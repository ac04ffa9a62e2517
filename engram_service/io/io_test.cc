// Every back end reads the same blocks of a file, with and without O_DIRECT: whole file, last short
// block, beyond the end, a bad descriptor; more reads than places; wake through the eventfd.
#include <array>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include "engram_service/io/make_reader.h"

namespace twinspark::engram {
namespace {

constexpr size_t kBlocks = 300;
constexpr size_t kTail = 1000;  // bytes of the last block

class ReaderTest : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    std::string name = TWINSPARK_IO_TEST_DIR "/engram_io_XXXXXX";
    const int fd = mkstemp(name.data());
    ASSERT_GE(fd, 0);
    std::vector<uint8_t> bytes(kBlocks * 4096 + kTail);
    for (size_t i = 0; i < bytes.size(); ++i) {
      bytes[i] = static_cast<uint8_t>(i / 4096 * 7 + i % 251);
    }
    ASSERT_EQ(write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
    fsync(fd);
    close(fd);
    plain_ = open(name.c_str(), O_RDONLY);
    direct_ = open(name.c_str(), O_RDONLY | O_DIRECT);
    unlink(name.c_str());
    ASSERT_GE(plain_, 0);
  }
  void TearDown() override {
    close(plain_);
    if (direct_ >= 0) close(direct_);
  }

  std::unique_ptr<BlockReader> Make(size_t depth) {
    const int fds[] = {plain_};
    auto made = MakeReader({GetParam(), depth, 4}, fds, true);
    // Only a forbidden io_uring is an excuse.
    if (!made.ok() && GetParam() == "uring") return nullptr;
    EXPECT_TRUE(made.ok()) << made.status();
    return std::move(made->reader);
  }

  int plain_ = -1;
  int direct_ = -1;
};

TEST_P(ReaderTest, ReadsEveryBlock) {
  for (const int fd : {plain_, direct_}) {
    if (fd < 0) continue;
    const auto reader = Make(16);
    if (reader == nullptr) GTEST_SKIP() << "no io_uring here";
    size_t next = 0;
    size_t finished = 0;
    while (finished <= kBlocks) {
      while (next <= kBlocks && reader->in_flight() < reader->depth()) {
        reader->Submit({fd, next, next == kBlocks ? uint32_t{kTail} : 4096u, 1000 + next});
        ++next;
      }
      reader->Flush();
      std::array<BlockDone, kReapMax> done;
      const size_t count = reader->Reap(done, true);
      ASSERT_GT(count, 0u);
      for (size_t i = 0; i < count; ++i) {
        const size_t block = done[i].tag - 1000;
        ASSERT_EQ(done[i].error, 0);
        ASSERT_EQ(done[i].bytes, block == kBlocks ? kTail : 4096u);
        for (size_t b = 0; b < done[i].bytes; ++b) {
          ASSERT_EQ(done[i].data[b], static_cast<uint8_t>(block * 7 + (block * 4096 + b) % 251));
        }
        reader->Release(done[i].buffer);
        ++finished;
      }
    }
    EXPECT_EQ(reader->in_flight(), 0u);
  }
}

TEST_P(ReaderTest, EndOfFileAndErrorsComeBackAsSuch) {
  const auto reader = Make(4);
  if (reader == nullptr) GTEST_SKIP() << "no io_uring here";
  reader->Submit({plain_, kBlocks + 10, 4096, 1});
  reader->Submit({1 << 20, 0, 4096, 2});
  reader->Flush();
  size_t finished = 0;
  while (finished < 2) {
    std::array<BlockDone, 2> done;
    const size_t count = reader->Reap(done, true);
    for (size_t i = 0; i < count; ++i, ++finished) {
      EXPECT_EQ(done[i].bytes, 0u);
      EXPECT_EQ(done[i].error, done[i].tag == 1 ? 0 : EBADF);
      reader->Release(done[i].buffer);
    }
  }
}

TEST_P(ReaderTest, TheEventfdWakesASleepingOwner) {
  const auto reader = Make(4);
  if (reader == nullptr) GTEST_SKIP() << "no io_uring here";
  if (reader->event_fd() < 0) GTEST_SKIP() << "reads finish in Flush";
  for (uint64_t i = 0; i < 50; ++i) {
    reader->Submit({plain_, i, 4096, i});
    reader->Flush();
    std::array<BlockDone, 4> done;
    size_t count = reader->Reap(done, false);
    while (count == 0) {
      pollfd watch = {reader->event_fd(), POLLIN, 0};
      ASSERT_EQ(poll(&watch, 1, 20000), 1);
      count = reader->Reap(done, false);
    }
    ASSERT_EQ(count, 1u);
    EXPECT_EQ(done[0].tag, i);
    reader->Release(done[0].buffer);
  }
}

INSTANTIATE_TEST_SUITE_P(BackEnds,
                         ReaderTest,
                         ::testing::Values("inline", "threads", "uring", "auto"),
                         [](const auto& test) { return test.param; });

TEST(MakeReader, UnknownKind) {
  EXPECT_FALSE(MakeReader({"magic", 4, 4}, {}, true).ok());
}

}  // namespace
}  // namespace twinspark::engram
