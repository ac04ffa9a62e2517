// The packer's line of threads: extents are read, built and written, and taken note of, each by
// other threads, so that source, processor and drive work at the same time. Extents may arrive at
// the end in another order than they were read. Caller: row_table_writer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "absl/status/status.h"

#include "engram_service/store/row_format.h"
#include "engram_service/store/row_range_reader.h"

namespace twinspark::engram {

// One extent on its way.
struct ExtentWork {
  uint64_t extent = 0;
  std::vector<uint8_t> weights;  // rows of all its pages, in order
  std::vector<uint8_t> scales;
  AlignedBuffer pages;
  size_t page_bytes = 0;
  ExtentEntry entry{};
  uint32_t largest_scale = 0;
  absl::Status status;
};

struct PackSteps {
  std::function<absl::Status(ExtentWork& work, AlignedBuffer& buffer)> read;  // two threads
  std::function<absl::Status(ExtentWork& work)> build_and_write;              // three threads
  std::function<absl::Status(const ExtentWork& work)> note;                   // calling thread
};

// Until all extents were noted or one step failed; its error is the result.
absl::Status RunPackSteps(std::span<const uint64_t> extents, const PackSteps& steps);

}  // namespace twinspark::engram
