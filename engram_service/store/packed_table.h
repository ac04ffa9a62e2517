// Reader of an EGPACK01 file: one page holds a row with its scales, and every page that is read is
// checked before a byte of it is used. Spec: engram.md 3.3.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "engram_service/store/hasher.h"
#include "engram_service/store/row_format.h"
#include "engram_service/store/row_table.h"

namespace twinspark::engram {

class PackedTable : public RowTable {
 public:
  // Refuses, with the field named, a file that is not sealed, was cut, belongs to another layer,
  // geometry, token map or set of hash constants, or does not hold exactly `columns`.
  static absl::StatusOr<std::unique_ptr<PackedTable>> Open(const std::string& path,
                                                           const Hasher& hasher,
                                                           int layer_idx,
                                                           const std::vector<int>& columns,
                                                           bool direct);

  std::string_view tier() const override { return "packed"; }
  bool HasColumn(int column) const override {
    return column >= 0 && static_cast<size_t>(column) < first_page_.size() &&
           first_page_[static_cast<size_t>(column)] != kAbsent;
  }
  RowPlace Locate(int column, uint32_t bucket) const override;
  absl::Status CheckBlock(uint64_t block_idx, std::span<const uint8_t> block) const override;

  const PackedLayout& layout() const { return layout_; }
  const std::vector<ExtentEntry>& extents() const { return extents_; }

 private:
  static constexpr uint64_t kAbsent = UINT64_MAX;
  PackedTable() = default;

  PackedLayout layout_;
  std::vector<ExtentEntry> extents_;
  std::vector<uint64_t> first_page_;  // by column; kAbsent where another node has it
};

// Reads and checks header, segments and footer of a sealed file, without a model to compare with.
struct PackedFile {
  PackedLayout layout;
  std::vector<ExtentEntry> extents;
  uint64_t file_bytes = 0;
};
absl::StatusOr<PackedFile> ReadPackedFile(int fd, const std::string& path);

}  // namespace twinspark::engram
