// Parts of 256 KiB: short enough that a request that comes meanwhile does not wait for one.
#include "engram_service/service/table_scrubber.h"

#include <algorithm>
#include <utility>
#include <vector>

#include <sys/resource.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

#include "common/log.h"
#include "engram_service/store/row_range_reader.h"

namespace twinspark::engram {
namespace {

constexpr uint64_t kPartPages = 64;

}  // namespace

TableScrubber::TableScrubber(const TableSet& tables, ScrubOptions options)
    : tables_(tables), options_(std::move(options)) {
  for (int i = 0; i < tables_.num_layers(); ++i) {
    const auto* packed = dynamic_cast<const PackedTable*>(&tables_.table(i));
    if (packed != nullptr) stats_.pages_total += packed->layout().header.pages;
  }
  if (options_.bytes_per_second > 0 && stats_.pages_total > 0) {
    thread_ = std::thread([this] { Run(); });
  }
}

TableScrubber::~TableScrubber() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  stopped_.notify_all();
  if (thread_.joinable()) thread_.join();
}

ScrubStats TableScrubber::stats() const {
  const std::lock_guard lock(mutex_);
  return stats_;
}

bool TableScrubber::WaitFor(std::chrono::nanoseconds time) {
  std::unique_lock lock(mutex_);
  return !stopped_.wait_for(lock, time, [this] { return stop_; });
}

bool TableScrubber::WaitUntilIdle() {
  for (;;) {
    const uint64_t now = options_.requests ? options_.requests() : 0;
    if (now == std::exchange(last_requests_, now)) return true;
    if (!WaitFor(options_.idle)) return false;
  }
}

void TableScrubber::Run() {
  setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), 15);
  for (;;) {
    const auto begin = std::chrono::steady_clock::now();
    if (!RunPass()) return;
    const ScrubStats done = stats();
    LOG_INFO << "tables scrubbed pages=" << done.pages_total << " findings=" << done.findings;
    if (!WaitFor(begin + options_.pass_every - std::chrono::steady_clock::now())) return;
  }
}

bool TableScrubber::RunPass() {
  {
    const std::lock_guard lock(mutex_);
    stats_.pages_done = 0;
  }
  for (int i = 0; i < tables_.num_layers(); ++i) {
    const auto* packed = dynamic_cast<const PackedTable*>(&tables_.table(i));
    if (packed == nullptr) continue;
    for (uint64_t extent = 0; extent < packed->layout().num_extents(); ++extent) {
      if (!ScrubExtent(*packed, extent)) return false;
    }
  }
  const std::lock_guard lock(mutex_);
  ++stats_.passes;
  return true;
}

// The digest also catches a page that is whole and of this file but of an older write.
bool TableScrubber::ScrubExtent(const PackedTable& table, uint64_t extent) {
  const uint64_t first = extent * kPagesPerExtent;
  const uint64_t end = first + table.layout().ExtentPages(extent);
  std::vector<uint8_t> bytes(kPartPages * kPageBytes);
  Sha256 hash;
  bool readable = true;
  for (uint64_t page = first; page < end; page += kPartPages) {
    if (!WaitUntilIdle()) return false;
    const auto begin = std::chrono::steady_clock::now();
    const auto pages =
        std::span<uint8_t>(bytes).first(std::min(kPartPages, end - page) * kPageBytes);
    readable = CheckPart(table, page, pages) && readable;
    hash.Update(pages);
    {
      const std::lock_guard lock(mutex_);
      stats_.pages_done += pages.size() / kPageBytes;
    }
    const std::chrono::nanoseconds due(pages.size() * 1'000'000'000 / options_.bytes_per_second);
    if (!WaitFor(begin + due - std::chrono::steady_clock::now())) return false;
  }
  if (readable && hash.Finish() != table.extents()[extent].digest) {
    Found(absl::StrCat(table.path(), ": digest of extent ", extent, " differs"));
  }
  return true;
}

// Reads a part, once more where it was wrong; false when a page stays wrong, which is then counted.
bool TableScrubber::CheckPart(const PackedTable& table,
                              uint64_t first_page,
                              std::span<uint8_t> pages) {
  AlignedBuffer buffer;
  std::string finding;
  for (int attempt = 0; attempt < 2; ++attempt) {
    finding.clear();
    const absl::Status read =
        ReadFileRange(table.file(0), kHeaderRegionBytes + first_page * kPageBytes, pages, buffer);
    if (!read.ok()) finding = std::string(read.message());
    for (uint64_t i = 0; finding.empty() && i < pages.size() / kPageBytes; ++i) {
      const absl::Status checked =
          CheckPage(table.layout(), first_page + i, pages.subspan(i * kPageBytes, kPageBytes));
      if (!checked.ok()) finding = absl::StrCat(table.path(), ": ", checked.message());
    }
    if (finding.empty()) return true;
  }
  Found(finding);
  return false;
}

void TableScrubber::Found(const std::string& what) {
  LOG_ERROR << "scrub found damage error=\"" << what << "\"";
  const std::lock_guard lock(mutex_);
  ++stats_.findings;
  stats_.last_finding = what;
}

}  // namespace twinspark::engram
