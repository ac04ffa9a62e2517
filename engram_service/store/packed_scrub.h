// Reads every page of an open packed file and checks CRC, identity and extent digests: for tools
// and Verify; the scrubber of idle hours (engram_service/service) does the same in small parts.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "absl/status/statusor.h"

#include "engram_service/store/row_format.h"
#include "engram_service/store/row_table.h"

namespace twinspark::engram {

struct ScrubProgress {
  uint64_t extents_done = 0;
  uint64_t extents_total = 0;
};

// `report` gets each finding; the result is their number.
absl::StatusOr<uint64_t> ScrubPackedFile(const TableFile& file,
                                         const PackedLayout& layout,
                                         std::span<const ExtentEntry> extents,
                                         const std::function<void(const std::string&)>& report,
                                         const std::function<void(const ScrubProgress&)>& progress);

}  // namespace twinspark::engram
