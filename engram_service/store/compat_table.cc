// A column may begin in one file and end in the next (equal-rows split), so the file is looked up
// by row.
#include "engram_service/store/compat_table.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"

namespace twinspark::engram {
namespace {

constexpr char kMagic[] = "DSV41EN1";

}  // namespace

CompatHeader MakeCompatHeader(
    int layer_id, uint64_t lo, uint64_t hi, uint64_t rows, uint64_t bytes) {
  CompatHeader header;
  memcpy(header.magic, kMagic, 8);
  header.layer = static_cast<uint64_t>(layer_id);
  header.row_lo = lo;
  header.row_hi = hi;
  header.table_rows = rows;
  header.row_bytes = bytes;
  return header;
}

std::string CompatFileName(int layer_id, int rank, int world) {
  return absl::StrCat("engram-l", layer_id, "-r", rank, "of", world, ".bin");
}

absl::StatusOr<std::unique_ptr<CompatTable>> CompatTable::Open(
    const std::vector<std::string>& paths,
    const EngramShape& shape,
    const LayerHash& layer,
    bool direct) {
  std::unique_ptr<CompatTable> table(new CompatTable);
  table->layer_id_ = layer.layer_id;
  table->num_rows_ = layer.num_rows;
  table->row_weight_bytes_ = static_cast<uint32_t>(shape.row_weight_bytes());
  table->row_scale_bytes_ = static_cast<uint32_t>(shape.row_scale_bytes());
  table->offsets_ = layer.offsets;
  table->primes_ = layer.primes;
  Sha256 identity;
  for (const std::string& path : paths) {
    ASSIGN_OR_RETURN(TableFile file, OpenTableFile(path, direct));
    ASSIGN_OR_RETURN(const TableFile plain, OpenTableFile(path, false));
    std::vector<uint8_t> bytes(sizeof(CompatHeader));
    RETURN_IF_ERROR(ReadExactly(plain.fd.get(), 0, bytes, path));
    CompatHeader header;
    memcpy(&header, bytes.data(), sizeof(header));
    const auto refuse = [&](const char* field, uint64_t found, uint64_t expected) {
      return absl::DataLossError(
          absl::StrCat(path, ": ", field, " is ", found, ", expected ", expected));
    };
    if (memcmp(header.magic, kMagic, 8) != 0) {
      return absl::DataLossError(absl::StrCat(path, ": magic is not DSV41EN1"));
    }
    if (header.layer != static_cast<uint64_t>(layer.layer_id)) {
      return refuse("layer", header.layer, static_cast<uint64_t>(layer.layer_id));
    }
    if (header.table_rows != layer.num_rows) {
      return refuse("table rows", header.table_rows, layer.num_rows);
    }
    if (header.row_bytes != table->row_bytes()) {
      return refuse("row bytes", header.row_bytes, table->row_bytes());
    }
    if (header.row_lo >= header.row_hi || header.row_hi > layer.num_rows) {
      return refuse("row_hi", header.row_hi, layer.num_rows);
    }
    const uint64_t want = kCompatHeaderBytes + (header.row_hi - header.row_lo) * table->row_bytes();
    if (file.bytes != want) return refuse("file size", file.bytes, want);
    for (const Range& other : table->ranges_) {
      if (header.row_lo < other.hi && other.lo < header.row_hi) {
        return absl::DataLossError(
            absl::StrCat(path, ": rows ", header.row_lo, "..", header.row_hi,
                         " are in another file too: two different splits lie in one directory"));
      }
    }
    table->ranges_.push_back({header.row_lo, header.row_hi});
    table->files_.push_back(std::move(file));
    identity.Update(bytes);
  }
  if (table->files_.empty()) return absl::NotFoundError("no DSV41EN1 file");
  identity.UpdateU32(static_cast<uint32_t>(layer.layer_id));
  table->digest_ = identity.Finish();
  table->ContentFromFiles();
  return table;
}

int CompatTable::FileOfRow(uint64_t row) const {
  for (size_t i = 0; i < ranges_.size(); ++i) {
    if (row >= ranges_[i].lo && row < ranges_[i].hi) return static_cast<int>(i);
  }
  return -1;
}

bool CompatTable::HasColumn(int column) const {
  if (column < 0 || static_cast<size_t>(column) >= offsets_.size()) return false;
  const size_t c = static_cast<size_t>(column);
  uint64_t row = offsets_[c];
  const uint64_t end = row + primes_[c];
  while (row < end) {
    const int file_idx = FileOfRow(row);
    if (file_idx < 0) return false;
    row = ranges_[static_cast<size_t>(file_idx)].hi;
  }
  return true;
}

RowPlace CompatTable::Locate(int column, uint32_t bucket) const {
  const uint64_t row = offsets_[static_cast<size_t>(column)] + bucket;
  const int file_idx = FileOfRow(row);
  const uint64_t lo = ranges_[static_cast<size_t>(file_idx)].lo;
  const uint64_t base = kCompatHeaderBytes + (row - lo) * row_bytes();
  RowPlace place;
  place.num_pieces = 2;
  place.pieces[0] = {base, static_cast<uint16_t>(row_weight_bytes_), 0,
                     static_cast<uint16_t>(file_idx)};
  place.pieces[1] = {base + row_weight_bytes_, static_cast<uint16_t>(row_scale_bytes_),
                     static_cast<uint16_t>(row_weight_bytes_), static_cast<uint16_t>(file_idx)};
  return place;
}

}  // namespace twinspark::engram
