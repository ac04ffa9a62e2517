// Order on disk: preallocate, header (building), then per batch of extents: data, sync, journal,
// sync; then every page read back, footer, sync, header (sealed), sync, rename, directory sync. A
// kill between any two of these leaves a file that the next run continues or finishes.
#include "engram_service/store/row_table_writer.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <numeric>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "engram_service/store/extent_builder.h"
#include "engram_service/store/pack_checker.h"
#include "engram_service/store/pack_journal.h"
#include "engram_service/store/pack_manifest.h"
#include "engram_service/store/pack_pipeline.h"
#include "engram_service/store/packed_table.h"
#include "engram_service/store/row_samples.h"

namespace twinspark::engram {
namespace {

constexpr size_t kResumeRehash = 16;  // journalled extents that are hashed again before going on
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
  absl::Status BuildAndWrite(ExtentWork& work);
  absl::Status FlushJournal();
  absl::Status Check();
  absl::Status Seal();
  absl::Status CompleteManifest(const PackedHeader& header) const;
  void Report(const char* phase, uint64_t done, uint64_t total) const;

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
  RETURN_IF_ERROR(CompleteManifest(file->layout.header));
  return true;
}

// A file that was packed before there were samples, or by a run that ended right after the rename,
// gets them now, if its own rows are still those of the source.
absl::Status Packer::CompleteManifest(const PackedHeader& header) const {
  const LayerHash& layer = hasher_.layer(layer_idx_);
  const RowSamples stated =
      SamplesInManifest(final_path_, header.footer_digest, layer.primes.size());
  if (!std::all_of(stated.begin(), stated.end(),
                   [](const std::string& sample) { return sample.empty(); })) {
    return absl::OkStatus();
  }
  ASSIGN_OR_RETURN(const auto packed, PackedTable::Open(final_path_, hasher_, layer_idx_,
                                                        options_.target.columns, false));
  ASSIGN_OR_RETURN(const RowSamples own, SampleRows(*packed, layer));
  ASSIGN_OR_RETURN(const RowSamples samples, SampleRows(source_, layer));
  if (const int column = FirstDifference(own, samples); column >= 0) {
    return absl::FailedPreconditionError(absl::StrCat(final_path_, ": rows of column ", column,
                                                      " differ from ", source_.path(),
                                                      "; delete the file to pack it anew"));
  }
  PackFacts facts;
  facts.source = source_.path();
  facts.rows_compared = uint64_t{kSampledRowsPerColumn} * options_.target.columns.size();
  return WriteManifest(final_path_, header, facts, samples);
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
    const auto pages = data.Get(kExtentBytes).first(ExtentBytes(layout_, believed));
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

absl::Status Packer::BuildAndWrite(ExtentWork& work) {
  RETURN_IF_ERROR(BuildExtent(source_, layout_, work));
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
  steps.read = [this](ExtentWork& work, AlignedBuffer& buffer) {
    return ReadExtent(source_, layout_, work, buffer);
  };
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

// Journalled data that went bad on disk after it was synced is written once more.
absl::Status Packer::Check() {
  const auto begin = Clock::now();
  const PackChecker checker(
      source_, layout_, entries_, partial_path_, partial_.get(), files_,
      [this](const char* phase, uint64_t done, uint64_t total) { Report(phase, done, total); });
  std::vector<uint64_t> extents(entries_.size());
  std::iota(extents.begin(), extents.end(), uint64_t{0});
  ASSIGN_OR_RETURN(const std::vector<uint64_t> bad, checker.FindBadExtents(extents));
  if (!bad.empty()) {
    RETURN_IF_ERROR(PackExtents(bad));
    ASSIGN_OR_RETURN(const std::vector<uint64_t> still_bad, checker.FindBadExtents(bad));
    if (!still_bad.empty()) {
      return absl::DataLossError(absl::StrCat(partial_path_, ": extent ", still_bad.front(),
                                              " does not read back as it was written"));
    }
  }
  result_.verify_seconds = SecondsSince(begin);
  ASSIGN_OR_RETURN(result_.rows_compared, options_.compare_all_rows ? checker.CompareAllRows()
                                                                    : checker.CompareSampledRows());
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
  PackFacts facts;
  facts.source = source_.path();
  facts.rows_compared = result_.rows_compared;
  facts.largest_scale = result_.largest_scale;
  ASSIGN_OR_RETURN(const RowSamples samples, SampleRows(source_, hasher_.layer(layer_idx_)));
  RETURN_IF_ERROR(WriteManifest(final_path_, layout_.header, facts, samples));
  return files_.Unlink(journal_path_);
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
  const auto begin = Clock::now();
  if (!extents.empty()) RETURN_IF_ERROR(PackExtents(extents));
  result_.pack_seconds = SecondsSince(begin);
  RETURN_IF_ERROR(Check());
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

}  // namespace twinspark::engram
