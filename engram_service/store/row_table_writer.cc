// Order on disk: preallocate, header (building), then per batch of extents: data, sync, journal,
// sync; then every page read back, footer, sync, header (sealed), sync, rename, directory sync. A
// kill between any two of these leaves a file that the next run continues or finishes.
#include "engram_service/store/row_table_writer.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"

#include "boost/json.hpp"
#include "common/check.h"
#include "common/file_util.h"
#include "common/status_macros.h"
#include "engram_service/store/crc32c.h"
#include "engram_service/store/pack_journal.h"
#include "engram_service/store/pack_pipeline.h"
#include "engram_service/store/packed_table.h"
#include "engram_service/store/row_range_reader.h"

namespace twinspark::engram {
namespace {

constexpr size_t kExtentBytes = size_t{kPagesPerExtent} * kPageBytes;
constexpr size_t kResumeRehash = 16;  // journalled extents that are hashed again before going on
constexpr int kReadAttempts = 3;
constexpr size_t kVerifiers = 2;  // one hashes while the other reads
constexpr size_t kMaxJournalBytes = size_t{64} << 20;

using Clock = std::chrono::steady_clock;

double SecondsSince(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// The part of a header that has to be equal for two runs to be about the same file.
PackedHeader PlanOf(PackedHeader header) {
  header.created_unix = 0;
  header.state = kStateBuilding;
  header.footer_digest = {};
  SealHeader(header);
  return header;
}

bool SameSegments(const std::vector<PackedSegment>& a, const std::vector<PackedSegment>& b) {
  return a.size() == b.size() && memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
}

bool SamePlan(const PackedLayout& a, const PackedLayout& b) {
  const PackedHeader x = PlanOf(a.header);
  const PackedHeader y = PlanOf(b.header);
  return memcmp(&x, &y, sizeof(x)) == 0 && SameSegments(a.segments, b.segments);
}

class Packer {
 public:
  Packer(const RowTable& source,
         const PackSource& provenance,
         const Hasher& hasher,
         int layer_idx,
         const PackOptions& options,
         PackFiles& files)
      : source_(source),
        provenance_(provenance),
        hasher_(hasher),
        layer_idx_(layer_idx),
        options_(options),
        files_(files) {}

  absl::StatusOr<PackResult> Run();

 private:
  absl::Status Plan();
  absl::Status Lock();
  absl::StatusOr<bool> AlreadyThere();
  absl::Status OpenPartial();
  absl::Status StartOver();
  absl::StatusOr<bool> Resume();
  absl::Status PackExtents(const std::vector<uint64_t>& extents);
  absl::Status ReadExtent(ExtentWork& work, AlignedBuffer& buffer) const;
  absl::Status BuildExtent(ExtentWork& work) const;
  absl::Status InvalidRow(uint64_t page_idx,
                          std::span<const uint8_t> weights,
                          std::span<const uint8_t> scales) const;
  absl::Status BuildAndWrite(ExtentWork& work);
  absl::Status FlushJournal();
  absl::StatusOr<bool> ReadsBack(uint64_t extent, AlignedBuffer& buffer);
  absl::Status VerifyExtents(const std::vector<uint64_t>& extents, std::vector<uint64_t>& bad);
  absl::Status CompareWithSource();
  absl::Status CompareExtent(uint64_t extent, AlignedBuffer& buffer);
  absl::Status CompareRow(const TableFile& file, uint64_t page, uint32_t slot);
  absl::Status Seal();
  absl::Status WriteManifest() const;
  void Report(const char* phase, uint64_t done, uint64_t total) const;

  uint64_t ExtentOffset(uint64_t extent) const {
    return kHeaderRegionBytes + extent * kExtentBytes;
  }
  size_t ExtentBytes(uint64_t extent) const {
    return size_t{layout_.ExtentPages(extent)} * kPageBytes;
  }

  const RowTable& source_;
  const PackSource& provenance_;
  const Hasher& hasher_;
  const int layer_idx_;
  const PackOptions& options_;
  PackFiles& files_;

  PackedLayout layout_;
  uint32_t plan_ = 0;
  std::string final_path_;
  std::string partial_path_;
  std::string journal_path_;
  Fd lock_;
  Fd partial_;  // O_DIRECT where the file system has it
  Fd journal_;
  std::vector<std::optional<ExtentEntry>> entries_;
  size_t num_journaled_ = 0;  // leading extents the journal holds
  PackResult result_;
};

absl::Status Packer::Plan() {
  ASSIGN_OR_RETURN(layout_,
                   PlanPackedFile(hasher_.shape(), hasher_.layer(layer_idx_), options_.target));
  PackedHeader& h = layout_.header;
  h.index_digest = provenance_.index_digest;
  h.source_header_digest = provenance_.header_digest;
  h.token_map_digest = hasher_.token_map().digest();
  h.hash_params_digest = HashParamsDigest(hasher_.layers());
  h.source_weight_offset = provenance_.weight_offset;
  h.source_scale_offset = provenance_.scale_offset;
  h.generation =
      Generation(provenance_.index_digest, provenance_.header_digest, source_.layer_id());
  h.created_unix = options_.created_unix;
  SealHeader(h);
  const PackedHeader plan = PlanOf(h);
  plan_ = plan.crc;
  final_path_ = options_.out_dir + "/" + PackedFileName(h);
  partial_path_ = final_path_ + ".partial";
  journal_path_ = final_path_ + ".journal";
  entries_.resize(layout_.num_extents());
  result_.path = final_path_;
  result_.pages = h.pages;
  result_.extents = layout_.num_extents();
  for (const PackedSegment& segment : layout_.segments) {
    if (!source_.HasColumn(static_cast<int>(segment.column))) {
      return absl::FailedPreconditionError(
          absl::StrCat(source_.path(), " does not hold column ", segment.column));
    }
  }
  return absl::OkStatus();
}

absl::Status Packer::Lock() {
  const std::string path = final_path_ + ".lock";
  lock_ = Fd(open(path.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644));
  if (!lock_.valid()) return ErrnoStatus(errno, path);
  if (flock(lock_.get(), LOCK_EX | LOCK_NB) == 0) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat(path, " is locked: another pack_rows works on this file"));
}

absl::StatusOr<bool> Packer::AlreadyThere() {
  if (!FileExists(final_path_)) return false;
  const Fd fd(open(final_path_.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, final_path_);
  const auto file = ReadPackedFile(fd.get(), final_path_);
  if (!file.ok()) {
    return absl::Status(file.status().code(),
                        absl::StrCat(file.status().message(), "; delete the file to pack it anew"));
  }
  if (!SamePlan(file->layout, layout_)) {
    return absl::FailedPreconditionError(
        absl::StrCat(final_path_,
                     " was packed from another source or for another model; delete it "
                     "to pack it anew"));
  }
  RETURN_IF_ERROR(files_.Unlink(journal_path_));
  return true;
}

absl::Status Packer::OpenPartial() {
  partial_ = Fd(open(partial_path_.c_str(), O_CREAT | O_RDWR | O_CLOEXEC | O_DIRECT, 0644));
  if (!partial_.valid()) {
    partial_ = Fd(open(partial_path_.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644));
  }
  if (!partial_.valid()) return ErrnoStatus(errno, partial_path_);
  journal_ = Fd(open(journal_path_.c_str(), O_CREAT | O_RDWR | O_CLOEXEC, 0644));
  if (!journal_.valid()) return ErrnoStatus(errno, journal_path_);
  ASSIGN_OR_RETURN(const bool resumed, Resume());
  return resumed ? absl::OkStatus() : StartOver();
}

absl::Status Packer::StartOver() {
  // The old journal must not speak for the new data.
  RETURN_IF_ERROR(files_.Truncate(journal_.get(), 0, journal_path_));
  RETURN_IF_ERROR(files_.Sync(journal_.get(), journal_path_));
  RETURN_IF_ERROR(files_.Truncate(partial_.get(), layout_.header.file_bytes, partial_path_));
  RETURN_IF_ERROR(files_.Allocate(partial_.get(), layout_.header.file_bytes, partial_path_));
  AlignedBuffer buffer;
  const std::vector<uint8_t> region = HeaderRegion(layout_);
  const auto aligned = buffer.Get(region.size()).first(region.size());
  std::copy(region.begin(), region.end(), aligned.begin());
  RETURN_IF_ERROR(files_.Write(partial_.get(), 0, aligned, partial_path_));
  return files_.Sync(partial_.get(), partial_path_);
}

// True when an earlier run of the same plan left something to go on with.
absl::StatusOr<bool> Packer::Resume() {
  ASSIGN_OR_RETURN(const uint64_t size, FileSize(partial_.get(), partial_path_));
  if (size != layout_.header.file_bytes) return false;
  AlignedBuffer buffer;
  const auto region = buffer.Get(kHeaderRegionBytes).first(kHeaderRegionBytes);
  RETURN_IF_ERROR(files_.Read(partial_.get(), 0, region, partial_path_));
  const auto found = ParseHeaderRegion(region, size);
  if (!found.ok() || !SamePlan(*found, layout_)) return false;
  layout_.header.created_unix = found->header.created_unix;
  SealHeader(layout_.header);
  ASSIGN_OR_RETURN(const std::vector<uint8_t> bytes,
                   ReadWholeFile(journal_path_, kMaxJournalBytes));
  const std::vector<ExtentEntry> journaled = ParseJournal(bytes, plan_);
  const size_t count = std::min<size_t>(journaled.size(), entries_.size());
  size_t believed = count > kResumeRehash ? count - kResumeRehash : 0;
  AlignedBuffer data;
  while (believed < count) {
    const auto pages = data.Get(kExtentBytes).first(ExtentBytes(believed));
    RETURN_IF_ERROR(files_.Read(partial_.get(), ExtentOffset(believed), pages, partial_path_));
    if (Sha256Of(pages) != journaled[believed].digest) break;
    ++believed;
  }
  for (size_t i = 0; i < believed; ++i)
    entries_[i] = journaled[i];
  num_journaled_ = believed;
  result_.extents_resumed = believed;
  RETURN_IF_ERROR(files_.Truncate(journal_.get(), believed * sizeof(JournalRecord), journal_path_));
  return true;
}

// Runs of pages of one segment are runs of buckets of one column.
absl::Status Packer::ReadExtent(ExtentWork& work, AlignedBuffer& buffer) const {
  const uint32_t width = layout_.header.row_weight_bytes;
  const uint32_t groups = layout_.header.row_scale_bytes;
  const uint64_t first_page = work.extent * kPagesPerExtent;
  const uint64_t end_page = first_page + layout_.ExtentPages(work.extent);
  work.weights.resize(size_t{kPagesPerExtent} * kRowsPerPage * width);
  work.scales.resize(size_t{kPagesPerExtent} * kRowsPerPage * groups);
  size_t rows = 0;
  for (uint64_t page = first_page; page < end_page;) {
    const PackedSegment& segment = layout_.SegmentOfPage(page);
    const uint64_t end = std::min(end_page, segment.first_page + segment.page_count);
    const uint64_t first = (page - segment.first_page) * kRowsPerPage;
    const uint64_t count =
        std::min((end - segment.first_page) * kRowsPerPage, segment.rows) - first;
    const auto weights = std::span(work.weights).subspan(rows * width, count * width);
    const auto scales = std::span(work.scales).subspan(rows * groups, count * groups);
    absl::Status status;
    for (int attempt = 0; attempt < kReadAttempts; ++attempt) {
      status =
          ReadColumnRows(source_, static_cast<int>(segment.column), static_cast<uint32_t>(first),
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
absl::Status Packer::BuildExtent(ExtentWork& work) const {
  const uint32_t width = layout_.header.row_weight_bytes;
  const uint32_t groups = layout_.header.row_scale_bytes;
  const uint32_t count = layout_.ExtentPages(work.extent);
  work.page_bytes = size_t{count} * kPageBytes;
  const auto out = work.pages.Get(kExtentBytes).first(work.page_bytes);
  Sha256 hash;
  uint32_t crc = 0;
  size_t row = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint64_t page_idx = work.extent * kPagesPerExtent + i;
    const PageRows rows = RowsOfPage(layout_, page_idx);
    const auto weights =
        std::span<const uint8_t>(work.weights).subspan(row * width, size_t{rows.count} * width);
    const auto scales =
        std::span<const uint8_t>(work.scales).subspan(row * groups, size_t{rows.count} * groups);
    if (HasInvalidCode(weights, scales)) return InvalidRow(page_idx, weights, scales);
    const auto page = out.subspan(size_t{i} * kPageBytes, kPageBytes);
    BuildPage(layout_, page_idx, weights, scales, page);
    crc = Crc32c(page, crc);
    hash.Update(page);
    row += rows.count;
  }
  work.entry = {crc, count, hash.Finish()};
  work.largest_scale = *std::max_element(work.scales.begin(), work.scales.end());
  return absl::OkStatus();
}

absl::Status Packer::InvalidRow(uint64_t page_idx,
                                std::span<const uint8_t> weights,
                                std::span<const uint8_t> scales) const {
  const uint32_t width = layout_.header.row_weight_bytes;
  const uint32_t groups = layout_.header.row_scale_bytes;
  const PackedSegment& segment = layout_.SegmentOfPage(page_idx);
  uint64_t row = segment.global_row_lo + (page_idx - segment.first_page) * kRowsPerPage;
  for (size_t i = 0;
       !HasInvalidCode(weights.subspan(i * width, width), scales.subspan(i * groups, groups));
       ++i) {
    ++row;
  }
  return absl::DataLossError(
      absl::StrCat(source_.path(), ": row ", row, " has a NaN code or scale 255"));
}

absl::Status Packer::BuildAndWrite(ExtentWork& work) {
  RETURN_IF_ERROR(BuildExtent(work));
  const auto pages = work.pages.Get(kExtentBytes).first(work.page_bytes);
  return files_.Write(partial_.get(), ExtentOffset(work.extent), pages, partial_path_);
}

// Data first, then the records that speak for it.
absl::Status Packer::FlushJournal() {
  size_t end = num_journaled_;
  while (end < entries_.size() && entries_[end].has_value())
    ++end;
  if (end == num_journaled_) return absl::OkStatus();
  RETURN_IF_ERROR(files_.Sync(partial_.get(), partial_path_));
  std::vector<JournalRecord> records;
  for (size_t i = num_journaled_; i < end; ++i) {
    records.push_back(MakeJournalRecord(i, *entries_[i], plan_));
  }
  const std::span bytes(reinterpret_cast<const uint8_t*>(records.data()),
                        records.size() * sizeof(JournalRecord));
  RETURN_IF_ERROR(
      files_.Write(journal_.get(), num_journaled_ * sizeof(JournalRecord), bytes, journal_path_));
  RETURN_IF_ERROR(files_.Sync(journal_.get(), journal_path_));
  num_journaled_ = end;
  return absl::OkStatus();
}

absl::Status Packer::PackExtents(const std::vector<uint64_t>& extents) {
  const auto begin = Clock::now();
  uint64_t bytes = 0;
  size_t since_sync = 0;
  PackSteps steps;
  steps.read = [this](ExtentWork& work, AlignedBuffer& buffer) { return ReadExtent(work, buffer); };
  steps.build_and_write = [this](ExtentWork& work) { return BuildAndWrite(work); };
  steps.note = [&](const ExtentWork& work) -> absl::Status {
    entries_[work.extent] = work.entry;
    result_.packed_bytes += work.page_bytes;
    result_.largest_scale = std::max(result_.largest_scale, work.largest_scale);
    bytes += work.page_bytes;
    if (++since_sync == options_.extents_per_sync) {
      RETURN_IF_ERROR(FlushJournal());
      since_sync = 0;
    }
    Report("pack", bytes, extents.size() * kExtentBytes);
    if (options_.bytes_per_second > 0) {
      const double due =
          static_cast<double>(bytes) / static_cast<double>(options_.bytes_per_second);
      const double ahead = due - SecondsSince(begin);
      if (ahead > 0) std::this_thread::sleep_for(std::chrono::duration<double>(ahead));
    }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(RunPackSteps(extents, steps));
  return FlushJournal();
}

absl::StatusOr<bool> Packer::ReadsBack(uint64_t extent, AlignedBuffer& buffer) {
  const auto pages = buffer.Get(kExtentBytes).first(ExtentBytes(extent));
  RETURN_IF_ERROR(files_.Read(partial_.get(), ExtentOffset(extent), pages, partial_path_));
  Sha256 hash;
  for (uint32_t i = 0; i < layout_.ExtentPages(extent); ++i) {
    const auto page = pages.subspan(size_t{i} * kPageBytes, kPageBytes);
    if (!CheckPage(layout_, extent * kPagesPerExtent + i, page).ok()) return false;
    hash.Update(page);
  }
  return hash.Finish() == entries_[extent]->digest;
}

absl::Status Packer::VerifyExtents(const std::vector<uint64_t>& extents,
                                   std::vector<uint64_t>& bad) {
  std::mutex mutex;
  absl::Status status;
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
      done += ExtentBytes(extents[i]);
      Report("verify", done, extents.size() * kExtentBytes);
    }
  };
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kVerifiers; ++i)
    threads.emplace_back(verify);
  for (std::thread& thread : threads)
    thread.join();
  std::sort(bad.begin(), bad.end());
  return status;
}

absl::Status Packer::CompareRow(const TableFile& file, uint64_t page, uint32_t slot) {
  const PackedHeader& h = layout_.header;
  std::vector<uint8_t> packed(h.row_weight_bytes + h.row_scale_bytes);
  std::vector<uint8_t> wanted(packed.size());
  AlignedBuffer buffer;
  const uint64_t base = kHeaderRegionBytes + page * kPageBytes;
  const std::span<uint8_t> row(packed);
  RETURN_IF_ERROR(
      ReadFileRange(file, base + slot * h.row_weight_bytes, row.first(h.row_weight_bytes), buffer));
  RETURN_IF_ERROR(ReadFileRange(file,
                                base + kRowsPerPage * h.row_weight_bytes + slot * h.row_scale_bytes,
                                row.subspan(h.row_weight_bytes), buffer));
  const PackedSegment& segment = layout_.SegmentOfPage(page);
  const auto bucket = static_cast<uint32_t>((page - segment.first_page) * kRowsPerPage + slot);
  RETURN_IF_ERROR(source_.ReadRow(static_cast<int>(segment.column), bucket, wanted));
  ++result_.rows_compared;
  if (packed == wanted) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(partial_path_, ": row ", segment.global_row_lo + bucket,
                                          " differs from ", source_.path()));
}

absl::Status Packer::CompareExtent(uint64_t extent, AlignedBuffer& buffer) {
  ExtentWork work;
  work.extent = extent;
  RETURN_IF_ERROR(ReadExtent(work, buffer));
  RETURN_IF_ERROR(BuildExtent(work));
  result_.rows_compared += work.weights.size() / layout_.header.row_weight_bytes;
  if (work.entry.digest == entries_[extent]->digest) return absl::OkStatus();
  return absl::DataLossError(
      absl::StrCat(partial_path_, ": rows of extent ", extent, " differ from ", source_.path()));
}

absl::Status Packer::CompareWithSource() {
  if (options_.compare_all_rows) {
    AlignedBuffer buffer;
    for (uint64_t extent = 0; extent < entries_.size(); ++extent) {
      RETURN_IF_ERROR(CompareExtent(extent, buffer));
      Report("compare", extent + 1, entries_.size());
    }
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const TableFile file, OpenTableFile(partial_path_, true));
  for (const PackedSegment& segment : layout_.segments) {
    const uint64_t last = segment.first_page + segment.page_count - 1;
    RETURN_IF_ERROR(CompareRow(file, segment.first_page, 0));
    RETURN_IF_ERROR(CompareRow(file, last, RowsOfPage(layout_, last).count - 1));
  }
  for (uint64_t extent = 0; extent < entries_.size(); ++extent) {
    const uint64_t page = extent * kPagesPerExtent + (extent * 7919) % layout_.ExtentPages(extent);
    const uint32_t rows = RowsOfPage(layout_, page).count;
    RETURN_IF_ERROR(CompareRow(file, page, static_cast<uint32_t>(extent * 31 % rows)));
    Report("compare", extent + 1, entries_.size());
  }
  return absl::OkStatus();
}

absl::Status Packer::Seal() {
  std::vector<ExtentEntry> extents;
  for (const auto& entry : entries_)
    extents.push_back(*entry);
  const std::vector<uint8_t> footer = FooterBytes(layout_, extents);
  AlignedBuffer buffer;
  auto aligned = buffer.Get(std::max<size_t>(footer.size(), kHeaderRegionBytes));
  std::copy(footer.begin(), footer.end(), aligned.begin());
  RETURN_IF_ERROR(files_.Write(partial_.get(), layout_.header.footer_offset,
                               aligned.first(footer.size()), partial_path_));
  RETURN_IF_ERROR(files_.Sync(partial_.get(), partial_path_));
  layout_.header.state = kStateSealed;
  layout_.header.footer_digest = Sha256Of(footer);
  SealHeader(layout_.header);
  memcpy(aligned.data(), &layout_.header, sizeof(PackedHeader));
  RETURN_IF_ERROR(
      files_.Write(partial_.get(), 0, aligned.first(sizeof(PackedHeader)), partial_path_));
  RETURN_IF_ERROR(files_.Sync(partial_.get(), partial_path_));
  RETURN_IF_ERROR(files_.Rename(partial_path_, final_path_));
  RETURN_IF_ERROR(WriteManifest());
  return files_.Unlink(journal_path_);
}

absl::Status Packer::WriteManifest() const {
  const PackedHeader& h = layout_.header;
  boost::json::object manifest;
  manifest["file"] = PackedFileName(h);
  manifest["layer"] = h.layer;
  manifest["node"] = h.node;
  manifest["nodes"] = h.nodes;
  manifest["rows"] = h.rows_here;
  manifest["pages"] = h.pages;
  manifest["bytes"] = h.file_bytes;
  manifest["source"] = source_.path();
  manifest["generation"] = absl::StrCat(absl::Hex(h.generation, absl::kZeroPad16));
  manifest["footer_sha256"] = Hex(h.footer_digest);
  manifest["rows_compared"] = result_.rows_compared;
  manifest["invalid_codes"] = 0;
  manifest["largest_scale_of_last_run"] = result_.largest_scale;
  return WriteFileAtomically(final_path_ + ".manifest.json",
                             boost::json::serialize(manifest) + "\n");
}

void Packer::Report(const char* phase, uint64_t done, uint64_t total) const {
  if (options_.progress) options_.progress({phase, done, total});
}

absl::StatusOr<PackResult> Packer::Run() {
  RETURN_IF_ERROR(Plan());
  RETURN_IF_ERROR(Lock());
  ASSIGN_OR_RETURN(result_.already_there, AlreadyThere());
  if (result_.already_there) return result_;
  RETURN_IF_ERROR(OpenPartial());
  std::vector<uint64_t> extents;
  for (uint64_t i = result_.extents_resumed; i < entries_.size(); ++i)
    extents.push_back(i);
  auto begin = Clock::now();
  if (!extents.empty()) RETURN_IF_ERROR(PackExtents(extents));
  result_.pack_seconds = SecondsSince(begin);
  begin = Clock::now();
  extents.clear();
  for (uint64_t i = 0; i < entries_.size(); ++i)
    extents.push_back(i);
  std::vector<uint64_t> bad;
  RETURN_IF_ERROR(VerifyExtents(extents, bad));
  if (!bad.empty()) {
    // Journalled data went bad on disk after it was synced: write it once more.
    RETURN_IF_ERROR(PackExtents(bad));
    std::vector<uint64_t> still_bad;
    RETURN_IF_ERROR(VerifyExtents(bad, still_bad));
    if (!still_bad.empty()) {
      return absl::DataLossError(absl::StrCat(partial_path_, ": extent ", still_bad.front(),
                                              " does not read back as it was written"));
    }
  }
  result_.verify_seconds = SecondsSince(begin);
  RETURN_IF_ERROR(CompareWithSource());
  RETURN_IF_ERROR(Seal());
  return result_;
}

}  // namespace

PackSource SourceOf(const NativeTable& table) {
  return {table.index_digest(), table.header_digest(), table.weight_offset(), table.scale_offset()};
}

absl::StatusOr<PackResult> PackTable(const RowTable& source,
                                     const PackSource& provenance,
                                     const Hasher& hasher,
                                     int layer_idx,
                                     const PackOptions& options,
                                     PackFiles& files) {
  return Packer(source, provenance, hasher, layer_idx, options, files).Run();
}

absl::StatusOr<uint64_t> ScrubPackedFile(const TableFile& file,
                                         const PackedLayout& layout,
                                         std::span<const ExtentEntry> extents,
                                         const std::function<void(const std::string&)>& report,
                                         const std::function<void(const PackProgress&)>& progress) {
  AlignedBuffer buffer;
  std::vector<uint8_t> bytes(kExtentBytes);
  uint64_t findings = 0;
  for (uint64_t extent = 0; extent < layout.num_extents(); ++extent) {
    const auto pages =
        std::span<uint8_t>(bytes).first(size_t{layout.ExtentPages(extent)} * kPageBytes);
    RETURN_IF_ERROR(ReadFileRange(file, kHeaderRegionBytes + extent * kExtentBytes, pages, buffer));
    for (uint32_t i = 0; i < layout.ExtentPages(extent); ++i) {
      const absl::Status checked = CheckPage(layout, extent * kPagesPerExtent + i,
                                             pages.subspan(size_t{i} * kPageBytes, kPageBytes));
      if (checked.ok()) continue;
      ++findings;
      report(std::string(checked.message()));
    }
    const ExtentEntry& entry = extents[extent];
    if (Sha256Of(pages) != entry.digest || Crc32c(pages) != entry.crc) {
      ++findings;
      report(absl::StrCat("digest of extent ", extent, " differs"));
    }
    if (progress) progress({"scrub", extent + 1, layout.num_extents()});
  }
  return findings;
}

}  // namespace twinspark::engram
