// See pack_checker.h.
#include "engram_service/store/pack_checker.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "engram_service/store/extent_builder.h"
#include "engram_service/store/sha256.h"

namespace twinspark::engram {
namespace {

constexpr size_t kVerifiers = 2;  // one hashes while the other reads

}  // namespace

PackChecker::PackChecker(const RowTable& source,
                         const PackedLayout& layout,
                         std::span<const std::optional<ExtentEntry>> entries,
                         const std::string& path,
                         int fd,
                         PackFiles& files,
                         Progress progress)
    : source_(source),
      layout_(layout),
      entries_(entries),
      path_(path),
      fd_(fd),
      files_(files),
      progress_(std::move(progress)) {}

absl::StatusOr<bool> PackChecker::ReadsBack(uint64_t extent, AlignedBuffer& buffer) const {
  const auto pages = buffer.Get(kExtentBytes).first(ExtentBytes(layout_, extent));
  RETURN_IF_ERROR(files_.Read(fd_, ExtentOffset(extent), pages, path_));
  Sha256 hash;
  for (uint32_t i = 0; i < layout_.ExtentPages(extent); ++i) {
    const auto page = pages.subspan(size_t{i} * kPageBytes, kPageBytes);
    if (!CheckPage(layout_, extent * kPagesPerExtent + i, page).ok()) return false;
    hash.Update(page);
  }
  return hash.Finish() == entries_[extent]->digest;
}

absl::StatusOr<std::vector<uint64_t>> PackChecker::FindBadExtents(
    std::span<const uint64_t> extents) const {
  std::mutex mutex;
  absl::Status status;
  std::vector<uint64_t> bad;
  uint64_t done = 0;
  std::atomic<size_t> next{0};
  const auto verify = [&] {
    AlignedBuffer buffer;
    for (size_t i = next++; i < extents.size(); i = next++) {
      const absl::StatusOr<bool> good = ReadsBack(extents[i], buffer);
      const std::lock_guard lock(mutex);
      status.Update(good.status());
      if (!status.ok()) return;
      if (!*good) bad.push_back(extents[i]);
      done += ExtentBytes(layout_, extents[i]);
      progress_("verify", done, extents.size() * kExtentBytes);
    }
  };
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kVerifiers; ++i)
    threads.emplace_back(verify);
  for (std::thread& thread : threads)
    thread.join();
  RETURN_IF_ERROR(status);
  std::sort(bad.begin(), bad.end());
  return bad;
}

absl::Status PackChecker::CompareRow(const TableFile& file, uint64_t page, uint32_t slot) const {
  const PackedHeader& h = layout_.header;
  std::vector<uint8_t> packed(h.row_weight_bytes + h.row_scale_bytes);
  std::vector<uint8_t> wanted(packed.size());
  AlignedBuffer buffer;
  const uint64_t base = kHeaderRegionBytes + page * kPageBytes;
  const std::span<uint8_t> row(packed);
  RETURN_IF_ERROR(ReadFileRange(file, base + uint64_t{slot} * h.row_weight_bytes,
                                row.first(h.row_weight_bytes), buffer));
  RETURN_IF_ERROR(ReadFileRange(
      file, base + uint64_t{kRowsPerPage} * h.row_weight_bytes + uint64_t{slot} * h.row_scale_bytes,
      row.subspan(h.row_weight_bytes), buffer));
  const PackedSegment& segment = layout_.SegmentOfPage(page);
  const auto bucket = static_cast<uint32_t>((page - segment.first_page) * kRowsPerPage + slot);
  RETURN_IF_ERROR(source_.ReadRow(static_cast<int>(segment.column), bucket, wanted));
  if (packed == wanted) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(path_, ": row ", segment.global_row_lo + bucket,
                                          " differs from ", source_.path()));
}

absl::StatusOr<uint64_t> PackChecker::CompareAllRows() const {
  AlignedBuffer buffer;
  uint64_t rows = 0;
  for (uint64_t extent = 0; extent < entries_.size(); ++extent) {
    ExtentWork work;
    work.extent = extent;
    RETURN_IF_ERROR(ReadExtent(source_, layout_, work, buffer));
    RETURN_IF_ERROR(BuildExtent(source_, layout_, work));
    rows += work.weights.size() / layout_.header.row_weight_bytes;
    if (work.entry.digest != entries_[extent]->digest) {
      return absl::DataLossError(
          absl::StrCat(path_, ": rows of extent ", extent, " differ from ", source_.path()));
    }
    progress_("compare", extent + 1, entries_.size());
  }
  return rows;
}

absl::StatusOr<uint64_t> PackChecker::CompareSampledRows() const {
  ASSIGN_OR_RETURN(const TableFile file, OpenTableFile(path_, true));
  for (const PackedSegment& segment : layout_.segments) {
    const uint64_t last = segment.first_page + segment.page_count - 1;
    RETURN_IF_ERROR(CompareRow(file, segment.first_page, 0));
    RETURN_IF_ERROR(CompareRow(file, last, RowsOfPage(layout_, last).count - 1));
  }
  for (uint64_t extent = 0; extent < entries_.size(); ++extent) {
    const uint64_t page = extent * kPagesPerExtent + (extent * 7919) % layout_.ExtentPages(extent);
    const uint32_t rows = RowsOfPage(layout_, page).count;
    RETURN_IF_ERROR(CompareRow(file, page, static_cast<uint32_t>(extent * 31 % rows)));
    progress_("compare", extent + 1, entries_.size());
  }
  return 2 * layout_.segments.size() + entries_.size();
}

}  // namespace twinspark::engram
