// Reads the packed tables of an idle service from end to end, slowly, and checks every page and the
// digest of every extent, so that damage is known before an answer needs the row. Native tables
// have nothing to check against. Owns a thread; stats are thread-safe. Spec: engram.md 4.7, 4.11.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "engram_service/read/table_set.h"
#include "engram_service/store/packed_table.h"

namespace twinspark::engram {

struct ScrubStats {
  uint64_t pages_done = 0;  // of the pass in progress
  uint64_t pages_total = 0;
  uint64_t passes = 0;
  uint64_t findings = 0;  // pages and extents that were wrong twice in a row
  std::string last_finding;
};

struct ScrubOptions {
  uint64_t bytes_per_second = 0;  // 0 = no scrubbing
  // A number that grows with the requests: nothing is read until it stood still for `idle`.
  std::function<uint64_t()> requests;
  std::chrono::milliseconds idle = std::chrono::seconds(1);
  std::chrono::seconds pass_every = std::chrono::hours(24);
};

class TableScrubber {
 public:
  // `tables` outlives this object.
  TableScrubber(const TableSet& tables, ScrubOptions options);
  ~TableScrubber();
  TableScrubber(const TableScrubber&) = delete;
  TableScrubber& operator=(const TableScrubber&) = delete;

  ScrubStats stats() const;

 private:
  void Run();
  bool RunPass();  // false: stopped
  bool ScrubExtent(const PackedTable& table, uint64_t extent);
  bool CheckPart(const PackedTable& table, uint64_t first_page, std::span<uint8_t> pages);
  bool WaitFor(std::chrono::nanoseconds time);  // false: stopped
  bool WaitUntilIdle();
  void Found(const std::string& what);

  const TableSet& tables_;
  const ScrubOptions options_;
  uint64_t last_requests_ = 0;  // scrubbing thread
  mutable std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  ScrubStats stats_;
  std::thread thread_;
};

}  // namespace twinspark::engram
