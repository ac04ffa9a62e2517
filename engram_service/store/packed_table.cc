// Opening compares the file with the running model field by field; nothing is silently ignored.
#include "engram_service/store/packed_table.h"

#include <cerrno>
#include <utility>

#include <fcntl.h>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"

namespace twinspark::engram {
namespace {

constexpr uint64_t kMaxFooterBytes = uint64_t{1} << 30;

absl::Status Named(const std::string& path, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat(path, ": ", status.message()));
}

absl::Status CheckAgainstModel(const PackedLayout& layout,
                               const Hasher& hasher,
                               const LayerHash& layer,
                               const std::vector<int>& columns) {
  const PackedHeader& h = layout.header;
  const EngramShape& shape = hasher.shape();
  const auto differs = [](const char* field, auto found, auto expected) {
    return absl::FailedPreconditionError(
        absl::StrCat(field, " is ", found, ", this model has ", expected));
  };
  if (h.layer != static_cast<uint32_t>(layer.layer_id)) {
    return differs("layer", h.layer, layer.layer_id);
  }
  if (h.table_rows != layer.num_rows) return differs("table_rows", h.table_rows, layer.num_rows);
  if (h.row_weight_bytes != static_cast<uint32_t>(shape.row_weight_bytes())) {
    return differs("row_weight_bytes", h.row_weight_bytes, shape.row_weight_bytes());
  }
  if (h.heads != static_cast<uint32_t>(shape.num_heads) ||
      h.max_ngram != static_cast<uint32_t>(shape.max_ngram_size)) {
    return differs("heads", h.heads, shape.num_heads);
  }
  if (h.token_map_digest != hasher.token_map().digest()) {
    return differs("token map digest", Hex(h.token_map_digest), Hex(hasher.token_map().digest()));
  }
  const Sha256Digest params = HashParamsDigest(hasher.layers());
  if (h.hash_params_digest != params) {
    return differs("hash parameter digest", Hex(h.hash_params_digest), Hex(params));
  }
  if (layout.segments.size() != columns.size()) {
    return differs("segments", layout.segments.size(), columns.size());
  }
  for (size_t i = 0; i < columns.size(); ++i) {
    const PackedSegment& segment = layout.segments[i];
    const size_t c = static_cast<size_t>(columns[i]);
    if (segment.column != c) return differs("column of a segment", segment.column, columns[i]);
    if (segment.prime != layer.primes[c]) return differs("prime", segment.prime, layer.primes[c]);
    if (segment.global_row_lo != layer.offsets[c]) {
      return differs("global_row_lo", segment.global_row_lo, layer.offsets[c]);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<PackedFile> ReadPackedFile(int fd, const std::string& path) {
  PackedFile file;
  ASSIGN_OR_RETURN(file.file_bytes, FileSize(fd, path));
  std::vector<uint8_t> region(kHeaderRegionBytes);
  RETURN_IF_ERROR(ReadExactly(fd, 0, region, path));
  auto layout = ParseHeaderRegion(region, file.file_bytes);
  if (!layout.ok()) return Named(path, layout.status());
  file.layout = *std::move(layout);
  if (file.layout.header.state != kStateSealed) {
    return absl::FailedPreconditionError(absl::StrCat(path, ": state is ", file.layout.header.state,
                                                      " (building): finish pack_rows first"));
  }
  if (file.layout.header.footer_bytes > kMaxFooterBytes) {
    return absl::DataLossError(absl::StrCat(path, ": footer_bytes is too large"));
  }
  std::vector<uint8_t> footer(file.layout.header.footer_bytes);
  RETURN_IF_ERROR(ReadExactly(fd, file.layout.header.footer_offset, footer, path));
  auto extents = ParseFooter(file.layout, footer);
  if (!extents.ok()) return Named(path, extents.status());
  file.extents = *std::move(extents);
  return file;
}

absl::StatusOr<std::unique_ptr<PackedTable>> PackedTable::Open(const std::string& path,
                                                               const Hasher& hasher,
                                                               int layer_idx,
                                                               const std::vector<int>& columns,
                                                               bool direct) {
  std::unique_ptr<PackedTable> table(new PackedTable);
  const Fd plain(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!plain.valid()) return ErrnoStatus(errno, path);
  // Before its content is looked at: a change from here on shows in its identity.
  ASSIGN_OR_RETURN(TableFile opened, OpenTableFile(path, direct));
  table->files_.push_back(std::move(opened));
  ASSIGN_OR_RETURN(PackedFile file, ReadPackedFile(plain.get(), path));
  const LayerHash& layer = hasher.layer(layer_idx);
  const absl::Status fits = CheckAgainstModel(file.layout, hasher, layer, columns);
  if (!fits.ok()) return Named(path, fits);
  table->layout_ = std::move(file.layout);
  table->extents_ = std::move(file.extents);
  const PackedHeader& h = table->layout_.header;
  table->layer_id_ = layer.layer_id;
  table->num_rows_ = h.table_rows;
  table->row_weight_bytes_ = h.row_weight_bytes;
  table->row_scale_bytes_ = h.row_scale_bytes;
  table->first_page_.assign(layer.primes.size(), kAbsent);
  for (const PackedSegment& segment : table->layout_.segments) {
    table->first_page_[segment.column] = segment.first_page;
  }
  // The same identity as the native table it was made from.
  Sha256 identity;
  identity.Update(h.index_digest);
  identity.Update(h.source_header_digest);
  identity.UpdateU32(h.layer);
  table->digest_ = identity.Finish();
  table->content_ = h.footer_digest;
  return table;
}

RowPlace PackedTable::Locate(int column, uint32_t bucket) const {
  const uint64_t page = first_page_[static_cast<size_t>(column)] + bucket / kRowsPerPage;
  const uint32_t slot = bucket % kRowsPerPage;
  const uint64_t base = kHeaderRegionBytes + page * kPageBytes;
  RowPlace place;
  place.num_pieces = 2;
  place.pieces[0] = {base + slot * row_weight_bytes_, static_cast<uint16_t>(row_weight_bytes_), 0};
  place.pieces[1] = {base + kRowsPerPage * row_weight_bytes_ + slot * row_scale_bytes_,
                     static_cast<uint16_t>(row_scale_bytes_),
                     static_cast<uint16_t>(row_weight_bytes_)};
  return place;
}

absl::Status PackedTable::CheckBlock(uint64_t block_idx, std::span<const uint8_t> block) const {
  constexpr uint64_t kHeaderPages = kHeaderRegionBytes / kPageBytes;
  if (block_idx < kHeaderPages) return absl::InternalError("a row in the header region");
  return CheckPage(layout_, block_idx - kHeaderPages, block);
}

}  // namespace twinspark::engram
