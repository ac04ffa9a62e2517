// Long runs of rows from a table in file order, for packing and verifying: few large reads past the
// page cache instead of one per row. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"

#include "engram_service/store/row_table.h"

namespace twinspark::engram {

// A page-aligned buffer that grows; for O_DIRECT.
class AlignedBuffer {
 public:
  // At least `bytes`, uninitialised.
  std::span<uint8_t> Get(size_t bytes);

 private:
  struct Free {
    void operator()(uint8_t* p) const;
  };
  std::unique_ptr<uint8_t, Free> data_;
  size_t size_ = 0;
};

// Bytes [offset, offset + out.size()) of a table file, by aligned reads through `buffer`.
absl::Status ReadFileRange(const TableFile& file,
                           uint64_t offset,
                           std::span<uint8_t> out,
                           AlignedBuffer& buffer);

// Buckets [first, first + count) of a column: dense weights and scales.
absl::Status ReadColumnRows(const RowTable& table,
                            int column,
                            uint32_t first,
                            uint32_t count,
                            std::span<uint8_t> weights,
                            std::span<uint8_t> scales,
                            AlignedBuffer& buffer);

}  // namespace twinspark::engram
