// What Prometheus reads of a service after known gathers: every count at its layer and class,
// histograms with as many values as things happened, and nothing twice after a second update. The
// drive's temperature from a made-up sysfs.
#include "engram_service/service/engram_metrics.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include <sys/sysmacros.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/testing/temp_dir.h"
#include "engram_service/read/local_rows.h"
#include "engram_service/service/drive_temperature.h"
#include "engram_service/testing/small_model.h"

namespace twinspark::engram {
namespace {

using ::testing::HasSubstr;

class EngramMetricsTest : public ::testing::Test {
 protected:
  void Write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((dir_ / path).parent_path());
    std::ofstream(dir_ / path) << text;
  }

  TempDir dir_;
};

TEST(Distribution, ABoundBelongsToItsBucket) {
  Distribution depth(kDepthBounds);
  for (const uint64_t value : {1, 2, 3, 4, 128, 129, 100'000})
    depth.Observe(value);
  ASSERT_EQ(depth.counts().size(), kDepthBounds.size() + 1);
  EXPECT_EQ(depth.counts()[0].get(), 1u);  // 1
  EXPECT_EQ(depth.counts()[1].get(), 1u);  // 2
  EXPECT_EQ(depth.counts()[2].get(), 2u);  // 3, 4
  EXPECT_EQ(depth.counts()[8].get(), 1u);  // 128
  EXPECT_EQ(depth.counts()[9].get(), 2u);  // above
  EXPECT_EQ(depth.sum(), 100'267u);
}

TEST_F(EngramMetricsTest, CountsAreAtTheirLayerAndClass) {
  ASSERT_TRUE(WriteSmallModel(dir_.path()).ok());
  ServingOptions options;
  options.tables = {dir_.path(), "", 0, 1};
  EngramServiceImpl service(options);
  const absl::Status opened = service.Open();
  ASSERT_TRUE(opened.ok()) << opened;
  RowServer& server = service.serving()->server();
  const GatherMeters& meters = server.meters();
  const uint64_t rows_before = meters.layers[1][1].rows.get();
  const uint64_t other_before = meters.layers[0][1].rows.get();
  std::vector<Window> windows;
  const std::vector<int32_t> ids = {5, 6, 7, 8, 9};
  ASSERT_TRUE(AppendWindows(service.serving()->tables().hasher(), {0, 0, ids, {}}, windows).ok());
  ASSERT_TRUE(server.Gather(windows, 0b10, std::chrono::milliseconds(60'000)).ok());
  // 5 tokens of 12 columns, of the second layer only.
  const uint64_t rows = meters.layers[1][1].rows.get();
  EXPECT_EQ(rows - rows_before, 60u);
  EXPECT_EQ(meters.layers[0][1].rows.get(), other_before);
  EXPECT_EQ(meters.layers[1][0].rows.get(), 0u);
  const auto count_reads = [&] {
    uint64_t sum = 0;
    for (const auto& layer : meters.layers) {
      for (const auto& of_class : layer)
        sum += of_class.reads.get();
    }
    return sum;
  };
  uint64_t reads = count_reads();
  EXPECT_GT(reads, 0u);

  Metrics metrics;
  const EngramMetrics feeding(metrics, service);
  const auto begin = std::chrono::steady_clock::now();
  const auto wait_for = [&](const std::string& text) {
    while (metrics.Text().find(text) == std::string::npos &&
           std::chrono::steady_clock::now() < begin + std::chrono::seconds(60))
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  };
  // The gauge of what is served comes last in an update.
  wait_for("dsv_engram_info{");
  const auto expect = [&] {
    const std::string text = metrics.Text();
    EXPECT_THAT(text, HasSubstr("dsv_engram_lookups_total{class=\"prefill\",layer=\"4\"} " +
                                std::to_string(rows) + "\n"));
    EXPECT_THAT(text, HasSubstr("dsv_engram_lookups_total{class=\"decode\",layer=\"4\"} 0\n"));
    EXPECT_THAT(text, HasSubstr("dsv_engram_read_seconds_count " + std::to_string(reads) + "\n"));
    EXPECT_THAT(text, HasSubstr("dsv_engram_reads_in_flight 0\n"));
    EXPECT_THAT(text, HasSubstr("dsv_engram_overloaded 0\n"));
    EXPECT_THAT(text, HasSubstr("dsv_engram_overloads_total 0\n"));
    EXPECT_THAT(text, HasSubstr("dsv_engram_queue_seconds_count{class=\"decode\"} 0\n"));
    EXPECT_THAT(text, HasSubstr("dsv_engram_gather_seconds_count{class=\"hint\",layer=\"1\"} 0\n"));
    EXPECT_THAT(text, HasSubstr("dsv_engram_read_seconds_bucket{le=\"1e-05\"}"));
  };
  expect();
  // A second update, which a changed count shows, adds nothing to what was counted before.
  ASSERT_TRUE(server.Gather(windows, 0b01, std::chrono::milliseconds(60'000)).ok());
  reads = count_reads();
  wait_for("dsv_engram_lookups_total{class=\"prefill\",layer=\"1\"} " +
           std::to_string(other_before + 60) + "\n");
  wait_for("dsv_engram_read_seconds_count " + std::to_string(reads) + "\n");
  expect();
}

TEST_F(EngramMetricsTest, TemperatureIsTheControllersOfThePartition) {
  const std::string controller = "devices/pci0000:00/0000:01:00.0/nvme/nvme0";
  const std::filesystem::path partition = dir_ / controller / "nvme0n1/nvme0n1p2";
  std::filesystem::create_directories(partition);
  std::filesystem::create_directories(dir_ / "dev/block");
  std::filesystem::create_directory_symlink(partition, dir_ / "dev/block/259:2");
  const dev_t device = makedev(259, 2);
  EXPECT_EQ(DriveTemperature(device, dir_.path()), std::nullopt);
  // A sensor of something else on the way up is not the drive's.
  Write("devices/pci0000:00/hwmon/hwmon0/name", "board\n");
  Write("devices/pci0000:00/hwmon/hwmon0/temp1_input", "90000\n");
  EXPECT_EQ(DriveTemperature(device, dir_.path()), std::nullopt);
  Write(controller + "/hwmon3/name", "nvme\n");
  EXPECT_EQ(DriveTemperature(device, dir_.path()), std::nullopt);
  Write(controller + "/hwmon3/temp1_input", "41850\n");
  EXPECT_EQ(DriveTemperature(device, dir_.path()), 41.85);
  EXPECT_EQ(DriveTemperature(makedev(0, 42), dir_.path()), std::nullopt);
  std::filesystem::remove_all(dir_ / controller / "hwmon3");
  Write("devices/pci0000:00/0000:01:00.0/hwmon/hwmon1/name", "nvme\n");
  Write("devices/pci0000:00/0000:01:00.0/hwmon/hwmon1/temp1_input", "38000\n");
  EXPECT_EQ(DriveTemperature(device, dir_.path()), 38.0);
}

}  // namespace
}  // namespace twinspark::engram
