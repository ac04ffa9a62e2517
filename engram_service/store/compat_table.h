// Reader of DSV41EN1, the packed layout other recipes use: rows [row_lo, row_hi) of a layer, each
// its weights then its scales, after a 4 KiB header; no checksums. Two row splits share one file
// name, so ranges come from the headers only. Several files of one layer together serve any column
// they cover. Spec: engram.md 3.2.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "engram_service/store/hash_params.h"
#include "engram_service/store/row_table.h"

namespace twinspark::engram {

struct CompatHeader {
  char magic[8];  // "DSV41EN1"
  uint64_t layer;
  uint64_t row_lo;
  uint64_t row_hi;
  uint64_t table_rows;
  uint64_t row_bytes;
};
static_assert(sizeof(CompatHeader) == 48);
inline constexpr uint64_t kCompatHeaderBytes = 4096;

CompatHeader MakeCompatHeader(
    int layer_id, uint64_t lo, uint64_t hi, uint64_t rows, uint64_t bytes);
std::string CompatFileName(int layer_id, int rank, int world);

class CompatTable : public RowTable {
 public:
  // Opens the files that belong to the layer; refuses wrong geometry, a size that does not fit the
  // header, or ranges that overlap.
  static absl::StatusOr<std::unique_ptr<CompatTable>> Open(const std::vector<std::string>& paths,
                                                           const EngramShape& shape,
                                                           const LayerHash& layer,
                                                           bool direct);

  std::string_view tier() const override { return "compat"; }
  bool HasColumn(int column) const override;
  RowPlace Locate(int column, uint32_t bucket) const override;
  absl::Status CheckBlock(uint64_t, std::span<const uint8_t>) const override {
    return absl::OkStatus();
  }

 private:
  struct Range {
    uint64_t lo = 0;
    uint64_t hi = 0;
  };
  CompatTable() = default;
  // File that holds the row, or -1.
  int FileOfRow(uint64_t row) const;

  std::vector<Range> ranges_;  // as files_
  std::vector<uint64_t> offsets_;
  std::vector<uint32_t> primes_;
};

}  // namespace twinspark::engram
