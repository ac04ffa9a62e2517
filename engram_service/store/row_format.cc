// Planning, writing and checking of the on-disk structs. Every check names the field it refuses.
#include "engram_service/store/row_format.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "common/status_macros.h"
#include "engram_service/store/crc32c.h"

namespace twinspark::engram {
namespace {

constexpr char kFileMagic[] = "EGPACK01";
constexpr char kFooterMagic[] = "EGFOOT01";

template <typename T>
std::span<const uint8_t> BytesOf(const T& value, size_t count) {
  return {reinterpret_cast<const uint8_t*>(&value), count};
}

uint64_t PagesOf(uint64_t rows) {
  return (rows + kRowsPerPage - 1) / kRowsPerPage;
}

uint64_t FooterSize(uint64_t extents) {
  const uint64_t bytes = sizeof(PackedFooter) + extents * sizeof(ExtentEntry);
  return (bytes + kPageBytes - 1) / kPageBytes * kPageBytes;
}

template <typename T>
absl::Status Refuse(const std::string& field, T found, T expected) {
  return absl::DataLossError(absl::StrCat(field, " is ", found, ", expected ", expected));
}

absl::Status Want(const char* field, uint64_t found, uint64_t expected) {
  return found == expected ? absl::OkStatus() : Refuse(field, found, expected);
}

absl::Status CheckSegment(const PackedHeader& header,
                          const PackedSegment& segment,
                          uint32_t index,
                          uint64_t first_page) {
  const std::string name = absl::StrCat("segment ", index, ": ");
  if (segment.crc != Crc32c(BytesOf(segment, 60))) {
    return absl::DataLossError(name + "CRC differs");
  }
  if (segment.first_page != first_page) {
    return Refuse(name + "first_page", segment.first_page, first_page);
  }
  if (segment.rows != segment.prime || segment.rows == 0) {
    return Refuse(name + "rows", segment.rows, uint64_t{segment.prime});
  }
  if (segment.page_count != PagesOf(segment.rows)) {
    return Refuse(name + "page_count", segment.page_count, PagesOf(segment.rows));
  }
  if (header.heads == 0 || segment.column / header.heads + 2 != segment.order ||
      segment.column % header.heads != segment.head || segment.order > header.max_ngram) {
    return absl::DataLossError(absl::StrCat(name, "column ", segment.column, " is not order ",
                                            segment.order, " head ", segment.head));
  }
  if (segment.rows > header.table_rows ||
      segment.global_row_lo > header.table_rows - segment.rows) {  // no sum: it may wrap
    return absl::DataLossError(absl::StrCat(name, "rows ", segment.global_row_lo, " + ",
                                            segment.rows, " of a table of ", header.table_rows));
  }
  return absl::OkStatus();
}

}  // namespace

uint32_t PackedLayout::ExtentPages(uint64_t extent) const {
  return static_cast<uint32_t>(
      std::min<uint64_t>(kPagesPerExtent, header.pages - extent * kPagesPerExtent));
}

const PackedSegment& PackedLayout::SegmentOfPage(uint64_t page) const {
  DCHECK(page < header.pages) << page << " of " << header.pages;
  const auto after = std::upper_bound(
      segments.begin(), segments.end(), page,
      [](uint64_t p, const PackedSegment& segment) { return p < segment.first_page; });
  return *(after - 1);
}

absl::StatusOr<PackedLayout> PlanPackedFile(const EngramShape& shape,
                                            const LayerHash& layer,
                                            const PackTarget& target) {
  if (shape.head_dim > 256) {
    return absl::InvalidArgumentError(absl::StrCat(
        "engram_head_dim ", shape.head_dim, "; packed pages hold rows of at most 256 weights"));
  }
  if (target.columns.empty() || target.columns.size() > kMaxSegments) {
    return absl::InvalidArgumentError(absl::StrCat(target.columns.size(), " columns to pack"));
  }
  PackedLayout layout;
  PackedHeader& h = layout.header;
  memset(static_cast<void*>(&h), 0, sizeof(h));
  memcpy(h.magic, kFileMagic, 8);
  h.version = 1;
  h.header_region_bytes = kHeaderRegionBytes;
  h.page_bytes = kPageBytes;
  h.rows_per_page = kRowsPerPage;
  h.row_weight_bytes = static_cast<uint32_t>(shape.row_weight_bytes());
  h.row_scale_bytes = static_cast<uint32_t>(shape.row_scale_bytes());
  h.weight_dtype = 1;
  h.scale_dtype = 2;
  h.scale_group = 32;
  h.layer = static_cast<uint32_t>(layer.layer_id);
  h.node = target.node;
  h.nodes = target.nodes;
  h.scheme = target.scheme;
  h.heads = static_cast<uint32_t>(shape.num_heads);
  h.max_ngram = static_cast<uint32_t>(shape.max_ngram_size);
  h.segments = static_cast<uint32_t>(target.columns.size());
  h.table_rows = layer.num_rows;
  h.data_offset = kHeaderRegionBytes;
  for (const int column : target.columns) {
    const size_t c = static_cast<size_t>(column);
    CHECK_LT(c, layer.primes.size());
    PackedSegment segment = {};
    segment.column = static_cast<uint32_t>(column);
    segment.order = static_cast<uint32_t>(column / shape.num_heads + 2);
    segment.head = static_cast<uint32_t>(column % shape.num_heads);
    segment.prime = layer.primes[c];
    segment.global_row_lo = layer.offsets[c];
    segment.rows = layer.primes[c];
    segment.first_page = h.pages;
    segment.page_count = PagesOf(segment.rows);
    segment.crc = Crc32c(BytesOf(segment, 60));
    h.pages += segment.page_count;
    h.rows_here += segment.rows;
    layout.segments.push_back(segment);
  }
  h.footer_offset = h.data_offset + h.pages * kPageBytes;
  h.footer_bytes = FooterSize(layout.num_extents());
  h.file_bytes = h.footer_offset + h.footer_bytes;
  SealHeader(h);
  return layout;
}

void SealHeader(PackedHeader& header) {
  header.crc = Crc32c(BytesOf(header, 4092));
}

std::vector<uint8_t> HeaderRegion(const PackedLayout& layout) {
  std::vector<uint8_t> bytes(kHeaderRegionBytes);
  memcpy(bytes.data(), &layout.header, sizeof(PackedHeader));
  memcpy(&bytes[sizeof(PackedHeader)], layout.segments.data(),
         layout.segments.size() * sizeof(PackedSegment));
  return bytes;
}

absl::StatusOr<PackedLayout> ParseHeaderRegion(std::span<const uint8_t> bytes,
                                               uint64_t file_bytes) {
  if (bytes.size() < kHeaderRegionBytes) return Refuse("header bytes", bytes.size(), size_t{65536});
  PackedLayout layout;
  PackedHeader& h = layout.header;
  memcpy(&h, bytes.data(), sizeof(h));
  if (memcmp(h.magic, kFileMagic, 8) != 0) return absl::DataLossError("magic is not EGPACK01");
  if (h.crc != Crc32c(bytes.first(4092))) return absl::DataLossError("header CRC differs");
  RETURN_IF_ERROR(Want("version", h.version, 1));
  RETURN_IF_ERROR(Want("header_region_bytes", h.header_region_bytes, kHeaderRegionBytes));
  RETURN_IF_ERROR(Want("page_bytes", h.page_bytes, kPageBytes));
  RETURN_IF_ERROR(Want("rows_per_page", h.rows_per_page, kRowsPerPage));
  RETURN_IF_ERROR(Want("weight_dtype", h.weight_dtype, 1));
  RETURN_IF_ERROR(Want("scale_dtype", h.scale_dtype, 2));
  RETURN_IF_ERROR(Want("scale_group", h.scale_group, 32));
  RETURN_IF_ERROR(Want("data_offset", h.data_offset, kHeaderRegionBytes));
  if (h.row_weight_bytes == 0 || h.row_weight_bytes > 256 || h.row_weight_bytes % 32 != 0 ||
      h.row_scale_bytes != h.row_weight_bytes / 32) {
    return absl::DataLossError(
        absl::StrCat("rows of ", h.row_weight_bytes, " + ", h.row_scale_bytes, " bytes"));
  }
  if (h.segments < 1 || h.segments > kMaxSegments) {
    return absl::DataLossError(absl::StrCat("segments is ", h.segments));
  }
  RETURN_IF_ERROR(Want("file_bytes", file_bytes, h.file_bytes));
  layout.segments.resize(h.segments);
  memcpy(layout.segments.data(), &bytes[sizeof(PackedHeader)], h.segments * sizeof(PackedSegment));
  // Zero fill after the segments is part of the format: a flipped bit there is damage as well.
  for (size_t i = sizeof(PackedHeader) + h.segments * sizeof(PackedSegment); i < kHeaderRegionBytes;
       ++i) {
    if (bytes[i] != 0) return absl::DataLossError(absl::StrCat("byte ", i, " is not zero"));
  }
  uint64_t pages = 0;
  uint64_t rows = 0;
  for (uint32_t i = 0; i < h.segments; ++i) {
    RETURN_IF_ERROR(CheckSegment(h, layout.segments[i], i, pages));
    if (i > 0 && layout.segments[i].column <= layout.segments[i - 1].column) {
      return absl::DataLossError(absl::StrCat("segment ", i, ": columns do not ascend"));
    }
    pages += layout.segments[i].page_count;
    rows += layout.segments[i].rows;
  }
  RETURN_IF_ERROR(Want("pages", h.pages, pages));
  RETURN_IF_ERROR(Want("rows_here", h.rows_here, rows));
  RETURN_IF_ERROR(Want("footer_offset", h.footer_offset, kHeaderRegionBytes + pages * kPageBytes));
  RETURN_IF_ERROR(Want("footer_bytes", h.footer_bytes, FooterSize(layout.num_extents())));
  RETURN_IF_ERROR(Want("file_bytes", h.file_bytes, h.footer_offset + h.footer_bytes));
  return layout;
}

std::vector<uint8_t> FooterBytes(const PackedLayout& layout, std::span<const ExtentEntry> extents) {
  CHECK_EQ(extents.size(), layout.num_extents());
  PackedFooter footer = {};
  memcpy(footer.magic, kFooterMagic, 8);
  footer.version = 1;
  footer.pages_per_extent = kPagesPerExtent;
  footer.extents = extents.size();
  footer.pages = layout.header.pages;
  const std::span entries(reinterpret_cast<const uint8_t*>(extents.data()), extents.size_bytes());
  footer.digests = Sha256Of(entries);
  std::vector<uint8_t> bytes(layout.header.footer_bytes);
  memcpy(bytes.data(), &footer, sizeof(footer));
  std::copy(entries.begin(), entries.end(), bytes.begin() + sizeof(footer));
  return bytes;
}

absl::StatusOr<std::vector<ExtentEntry>> ParseFooter(const PackedLayout& layout,
                                                     std::span<const uint8_t> bytes) {
  if (bytes.size() != layout.header.footer_bytes) {
    return Refuse("footer bytes", uint64_t{bytes.size()}, layout.header.footer_bytes);
  }
  if (Sha256Of(bytes) != layout.header.footer_digest) {
    return absl::DataLossError("footer digest differs from the header's");
  }
  PackedFooter footer;
  memcpy(&footer, bytes.data(), sizeof(footer));
  if (memcmp(footer.magic, kFooterMagic, 8) != 0) {
    return absl::DataLossError("footer magic is not EGFOOT01");
  }
  RETURN_IF_ERROR(Want("footer version", footer.version, 1));
  RETURN_IF_ERROR(Want("pages_per_extent", footer.pages_per_extent, kPagesPerExtent));
  RETURN_IF_ERROR(Want("footer extents", footer.extents, layout.num_extents()));
  RETURN_IF_ERROR(Want("footer pages", footer.pages, layout.header.pages));
  std::vector<ExtentEntry> extents(footer.extents);
  memcpy(extents.data(), &bytes[sizeof(footer)], extents.size() * sizeof(ExtentEntry));
  if (Sha256Of(bytes.subspan(sizeof(footer), extents.size() * sizeof(ExtentEntry))) !=
      footer.digests) {
    return absl::DataLossError("digest of the extent entries differs");
  }
  for (uint64_t i = 0; i < extents.size(); ++i) {
    RETURN_IF_ERROR(Want("pages of an extent", extents[i].pages, layout.ExtentPages(i)));
  }
  return extents;
}

PageRows RowsOfPage(const PackedLayout& layout, uint64_t page) {
  const PackedSegment& segment = layout.SegmentOfPage(page);
  const uint64_t first = (page - segment.first_page) * kRowsPerPage;
  return {segment.global_row_lo + first,
          static_cast<uint32_t>(std::min<uint64_t>(kRowsPerPage, segment.rows - first))};
}

void BuildPage(const PackedLayout& layout,
               uint64_t page,
               std::span<const uint8_t> weights,
               std::span<const uint8_t> scales,
               std::span<uint8_t> out) {
  const PackedHeader& h = layout.header;
  const PageRows rows = RowsOfPage(layout, page);
  CHECK_EQ(out.size(), kPageBytes);
  CHECK_EQ(weights.size(), size_t{rows.count} * h.row_weight_bytes);
  CHECK_EQ(scales.size(), size_t{rows.count} * h.row_scale_bytes);
  memset(out.data(), 0, kPageBytes);
  memcpy(out.data(), weights.data(), weights.size());
  memcpy(&out[size_t{kRowsPerPage} * h.row_weight_bytes], scales.data(), scales.size());
  PageTrailer trailer = {};
  trailer.magic = kPageMagic;
  trailer.version = 1;
  trailer.valid_rows = static_cast<uint16_t>(rows.count);
  trailer.first_row = rows.first_row;
  trailer.page_index = page;
  trailer.layer = h.layer;
  trailer.column = layout.SegmentOfPage(page).column;
  trailer.generation = h.generation;
  memcpy(&out[kPageTrailerOffset], &trailer, sizeof(trailer));
  trailer.crc = Crc32c(out.first(4092));
  memcpy(&out[4092], &trailer.crc, 4);
}

absl::Status CheckPage(const PackedLayout& layout, uint64_t page, std::span<const uint8_t> bytes) {
  if (bytes.size() != kPageBytes || page >= layout.header.pages) {
    return absl::DataLossError(absl::StrCat("page ", page, " with ", bytes.size(), " bytes"));
  }
  PageTrailer trailer;
  memcpy(&trailer, &bytes[kPageTrailerOffset], sizeof(trailer));
  if (trailer.crc != Crc32c(bytes.first(4092))) {
    return absl::DataLossError(absl::StrCat("CRC of page ", page, " differs"));
  }
  const PageRows rows = RowsOfPage(layout, page);
  if (trailer.magic != kPageMagic || trailer.version != 1 || trailer.page_index != page ||
      trailer.layer != layout.header.layer || trailer.column != layout.SegmentOfPage(page).column ||
      trailer.generation != layout.header.generation || trailer.first_row != rows.first_row ||
      trailer.valid_rows != rows.count) {
    return absl::DataLossError(absl::StrCat("page ", page, " says it is page ", trailer.page_index,
                                            " of column ", trailer.column, " of layer ",
                                            trailer.layer, ", row ", trailer.first_row,
                                            ": not the one that was asked for"));
  }
  return absl::OkStatus();
}

std::string PackedFileName(const PackedHeader& header) {
  const char* scheme = header.scheme == kSchemeBalanced     ? "bal"
                       : header.scheme == kSchemeContiguous ? "col"
                                                            : "all";
  char name[64];
  snprintf(name, sizeof(name), "engram-l%02u.n%uof%u.%s.egp", header.layer, header.node,
           header.nodes, scheme);
  return name;
}

}  // namespace twinspark::engram
