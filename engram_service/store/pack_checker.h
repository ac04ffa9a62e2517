// What a packed file has to pass before it gets its final name: every page read back from the disk,
// and rows compared with the source. Caller: row_table_writer.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engram_service/store/pack_files.h"
#include "engram_service/store/row_format.h"
#include "engram_service/store/row_range_reader.h"
#include "engram_service/store/row_table.h"

namespace twinspark::engram {

class PackChecker {
 public:
  // One call at a time, any thread.
  using Progress = std::function<void(const char* phase, uint64_t done, uint64_t total)>;

  // The file under `path`, open as `fd`; all that is passed in outlives the checker. `entries`
  // holds all extents when a method is called.
  PackChecker(const RowTable& source,
              const PackedLayout& layout,
              std::span<const std::optional<ExtentEntry>> entries,
              const std::string& path,
              int fd,
              PackFiles& files,
              Progress progress);

  // Those of `extents` that do not read back as they were written, ascending.
  absl::StatusOr<std::vector<uint64_t>> FindBadExtents(std::span<const uint64_t> extents) const;

  // Every row, or the borders of every column and one row per extent; the result is how many.
  // DATA_LOSS names the row or the extent that differs.
  absl::StatusOr<uint64_t> CompareAllRows() const;
  absl::StatusOr<uint64_t> CompareSampledRows() const;

 private:
  absl::StatusOr<bool> ReadsBack(uint64_t extent, AlignedBuffer& buffer) const;
  absl::Status CompareRow(const TableFile& file, uint64_t page, uint32_t slot) const;

  const RowTable& source_;
  const PackedLayout& layout_;
  const std::span<const std::optional<ExtentEntry>> entries_;
  const std::string& path_;
  const int fd_;
  PackFiles& files_;
  const Progress progress_;
};

}  // namespace twinspark::engram
