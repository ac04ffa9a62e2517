// How fast the drive alone reads a file and writes one like the packer's: large direct transfers,
// one after another and both at once. What pack_rows is compared with. Any thread.
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace twinspark::engram {

struct DiskRates {
  double read = 0;  // bytes per second, nothing else going on
  double write = 0;
  double read_beside = 0;  // while the other goes on
  double write_beside = 0;
};

// Moves up to `bytes` four times; the temporary file in `out_dir` has no name.
absl::StatusOr<DiskRates> MeasureDiskRates(const std::string& source,
                                           const std::string& out_dir,
                                           uint64_t bytes);

}  // namespace twinspark::engram
