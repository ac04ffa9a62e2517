// The scrubber over a packed synthetic table: a whole one is passed over without a finding, a
// damaged page is found and named, and nothing is read while requests come.
#include "engram_service/service/table_scrubber.h"

#include <atomic>
#include <fstream>
#include <memory>
#include <string>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/safetensors.h"
#include "common/testing/temp_dir.h"
#include "engram_service/store/native_table.h"
#include "engram_service/store/row_table_writer.h"
#include "engram_service/testing/small_model.h"

namespace twinspark::engram {
namespace {

using ::testing::HasSubstr;

class TableScrubberTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const EngramShape shape = SmallShape(300);
    ASSERT_TRUE(WriteSmallModel(dir_.path(), 300).ok());
    const auto hasher = LoadHasher(dir_.path());
    const auto checkpoint = Checkpoint::Open(dir_.path());
    ASSERT_TRUE(hasher.ok() && checkpoint.ok());
    for (int i = 0; i < 2; ++i) {
      const auto source = NativeTable::Open(**checkpoint, shape, (*hasher)->layer(i), false);
      ASSERT_TRUE(source.ok()) << source.status();
      PackOptions options;
      options.out_dir = dir_.path();
      options.target = {0, 1, kSchemeAll, *BalancedColumns(shape, 0, 1)};
      PackFiles files;
      const auto packed = PackTable(**source, SourceOf(**source), **hasher, i, options, files);
      ASSERT_TRUE(packed.ok()) << packed.status();
      path_ = packed->path;
    }
  }
  void Poke(uint64_t offset, char value) const {
    std::fstream file(path_, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(static_cast<std::streamoff>(offset));
    file.put(value);
  }
  // Stats once a pass is done.
  ScrubStats OnePass() const {
    const auto tables = TableSet::Open({dir_.path(), "", 0, 1});
    EXPECT_TRUE(tables.ok()) << tables.status();
    const TableScrubber scrubber(**tables, {uint64_t{1} << 40, nullptr});
    const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (scrubber.stats().passes == 0 && std::chrono::steady_clock::now() < give_up)
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
    return scrubber.stats();
  }

  TempDir dir_;
  std::string path_;  // of the second layer
};

TEST_F(TableScrubberTest, WholeTablesHaveNoFindings) {
  const ScrubStats stats = OnePass();
  EXPECT_EQ(stats.passes, 1u);
  EXPECT_GT(stats.pages_total, 400u);
  EXPECT_EQ(stats.pages_done, stats.pages_total);
  EXPECT_EQ(stats.findings, 0u);
}

TEST_F(TableScrubberTest, ADamagedPageIsNamed) {
  Poke(kHeaderRegionBytes + 7 * kPageBytes + 100, 'x');
  const ScrubStats stats = OnePass();
  EXPECT_EQ(stats.findings, 1u);
  EXPECT_THAT(stats.last_finding, HasSubstr(path_));
  EXPECT_THAT(stats.last_finding, HasSubstr("7"));
}

TEST_F(TableScrubberTest, NothingIsReadWhileRequestsCome) {
  const auto tables = TableSet::Open({dir_.path(), "", 0, 1});
  ASSERT_TRUE(tables.ok());
  std::atomic<bool> busy{true};
  std::atomic<uint64_t> requests{0};
  ScrubOptions options;
  options.bytes_per_second = uint64_t{1} << 40;
  options.idle = std::chrono::milliseconds(2);
  options.requests = [&] { return busy ? ++requests : requests.load(); };
  const TableScrubber scrubber(**tables, options);
  while (requests < 10)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  EXPECT_EQ(scrubber.stats().pages_done, 0u);
  busy = false;
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (scrubber.stats().passes == 0 && std::chrono::steady_clock::now() < give_up)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  EXPECT_EQ(scrubber.stats().passes, 1u);
}

}  // namespace
}  // namespace twinspark::engram
