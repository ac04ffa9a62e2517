// Temperature of the drive under a file system, as the kernel's hwmon has it. Linux only.
#pragma once

#include <filesystem>
#include <optional>

#include <sys/types.h>

namespace twinspark::engram {

// Degrees Celsius of the first sensor of the NVMe controller (or, with the drivetemp module, the
// SATA disk) that holds block device `device` (st_dev of a file on it). Nothing when the device is
// no plain partition or disk (overlay, network, LVM, multipath) or has no sensor. `sys`: where
// sysfs is. Thread-safe; a handful of small reads.
std::optional<double> DriveTemperature(dev_t device, const std::filesystem::path& sys = "/sys");

}  // namespace twinspark::engram
