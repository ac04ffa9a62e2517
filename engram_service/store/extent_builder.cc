// See extent_builder.h.
#include "engram_service/store/extent_builder.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "engram_service/store/crc32c.h"

namespace twinspark::engram {
namespace {

constexpr int kReadAttempts = 3;

absl::Status InvalidRow(const RowTable& source,
                        const PackedLayout& layout,
                        uint64_t page_idx,
                        std::span<const uint8_t> weights,
                        std::span<const uint8_t> scales) {
  const uint32_t width = layout.header.row_weight_bytes;
  const uint32_t groups = layout.header.row_scale_bytes;
  const PackedSegment& segment = layout.SegmentOfPage(page_idx);
  uint64_t row = segment.global_row_lo + (page_idx - segment.first_page) * kRowsPerPage;
  for (size_t i = 0;
       !HasInvalidCode(weights.subspan(i * width, width), scales.subspan(i * groups, groups));
       ++i) {
    ++row;
  }
  return absl::DataLossError(
      absl::StrCat(source.path(), ": row ", row, " has a NaN code or scale 255"));
}

}  // namespace

// Runs of pages of one segment are runs of buckets of one column.
absl::Status ReadExtent(const RowTable& source,
                        const PackedLayout& layout,
                        ExtentWork& work,
                        AlignedBuffer& buffer) {
  const uint32_t width = layout.header.row_weight_bytes;
  const uint32_t groups = layout.header.row_scale_bytes;
  const uint64_t first_page = work.extent * kPagesPerExtent;
  const uint64_t end_page = first_page + layout.ExtentPages(work.extent);
  work.weights.resize(size_t{kPagesPerExtent} * kRowsPerPage * width);
  work.scales.resize(size_t{kPagesPerExtent} * kRowsPerPage * groups);
  size_t rows = 0;
  for (uint64_t page = first_page; page < end_page;) {
    const PackedSegment& segment = layout.SegmentOfPage(page);
    const uint64_t end = std::min(end_page, segment.first_page + segment.page_count);
    const uint64_t first = (page - segment.first_page) * kRowsPerPage;
    const uint64_t count =
        std::min((end - segment.first_page) * kRowsPerPage, segment.rows) - first;
    const auto weights = std::span(work.weights).subspan(rows * width, count * width);
    const auto scales = std::span(work.scales).subspan(rows * groups, count * groups);
    absl::Status status;
    for (int attempt = 0; attempt < kReadAttempts; ++attempt) {
      status =
          ReadColumnRows(source, static_cast<int>(segment.column), static_cast<uint32_t>(first),
                         static_cast<uint32_t>(count), weights, scales, buffer);
      if (status.ok()) break;
    }
    RETURN_IF_ERROR(status);
    rows += count;
    page = end;
  }
  work.weights.resize(rows * width);
  work.scales.resize(rows * groups);
  return absl::OkStatus();
}

// Page by page, so that a page is checked, laid out and hashed while it is in the first cache.
absl::Status BuildExtent(const RowTable& source, const PackedLayout& layout, ExtentWork& work) {
  const uint32_t width = layout.header.row_weight_bytes;
  const uint32_t groups = layout.header.row_scale_bytes;
  const uint32_t count = layout.ExtentPages(work.extent);
  work.page_bytes = size_t{count} * kPageBytes;
  const auto out = work.pages.Get(kExtentBytes).first(work.page_bytes);
  Sha256 hash;
  uint32_t crc = 0;
  size_t row = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t page_idx = work.extent * kPagesPerExtent + i;
    const PageRows rows = RowsOfPage(layout, page_idx);
    const auto weights =
        std::span<const uint8_t>(work.weights).subspan(row * width, size_t{rows.count} * width);
    const auto scales =
        std::span<const uint8_t>(work.scales).subspan(row * groups, size_t{rows.count} * groups);
    if (HasInvalidCode(weights, scales))
      return InvalidRow(source, layout, page_idx, weights, scales);
    const auto page = out.subspan(size_t{i} * kPageBytes, kPageBytes);
    BuildPage(layout, page_idx, weights, scales, page);
    crc = Crc32c(page, crc);
    hash.Update(page);
    row += rows.count;
  }
  work.entry = {crc, count, hash.Finish()};
  work.largest_scale = *std::max_element(work.scales.begin(), work.scales.end());
  return absl::OkStatus();
}

}  // namespace twinspark::engram
