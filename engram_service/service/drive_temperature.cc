// From the partition up: hwmon of an NVMe controller is a child of the controller or of its PCI
// device, depending on the kernel; other sensors on the way (a board's) have other names.
#include "engram_service/service/drive_temperature.h"

#include <fstream>
#include <string>
#include <system_error>

#include <sys/sysmacros.h>

namespace twinspark::engram {
namespace {

namespace fs = std::filesystem;

std::optional<double> ReadSensor(const fs::path& hwmon) {
  std::string name;
  if (!(std::ifstream(hwmon / "name") >> name) || (name != "nvme" && name != "drivetemp"))
    return {};
  double millidegrees;
  if (!(std::ifstream(hwmon / "temp1_input") >> millidegrees)) return {};
  return millidegrees / 1000;
}

std::optional<double> ReadSensorIn(const fs::path& folder) {
  std::error_code ignored;
  for (fs::directory_iterator it(folder, ignored), end; it != end; it.increment(ignored)) {
    const std::string name = it->path().filename();
    if (!name.starts_with("hwmon") || name == "hwmon") continue;
    if (const auto celsius = ReadSensor(it->path())) return celsius;
  }
  return {};
}

}  // namespace

std::optional<double> DriveTemperature(dev_t device, const fs::path& sys) {
  std::error_code error;
  const fs::path top = fs::canonical(sys, error);
  const fs::path leaf = fs::canonical(
      sys / "dev/block" / (std::to_string(major(device)) + ":" + std::to_string(minor(device))),
      error);
  if (error) return {};
  for (fs::path at = leaf; at != top && at.has_relative_path(); at = at.parent_path()) {
    if (const auto celsius = ReadSensorIn(at)) return celsius;
    if (const auto celsius = ReadSensorIn(at / "hwmon")) return celsius;
  }
  return {};
}

}  // namespace twinspark::engram
