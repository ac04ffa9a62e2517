// The heart of the row service: windows in, rows out. Turns each window into rows, rows into the
// 4 KiB blocks that hold them, reads every block once however many rows want it (also across
// requests), copies the rows to their destinations and reports each layer when its last row is
// there. A row is passed on only when it was read completely and holds no invalid code; anything
// else is an error of the layer, never zeros.
//
// Threading: one owner thread (the service's reactor, or the caller of LocalRows) calls everything;
// callbacks run inside Start and Poll. Memory: pools that grow to the largest load, which the
// callers bound. Spec: engram.md 4.2, 4.6, 4.9.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"

#include "engram_service/io/block_reader.h"
#include "engram_service/read/gather_meters.h"
#include "engram_service/read/row_cache.h"
#include "engram_service/read/table_set.h"

namespace twinspark::engram {

enum class GatherStatus : uint8_t { kOk, kBadRequest, kDataError, kTimeout, kCancelled };

struct GatherJob {
  uint64_t owner = 0;  // Cancel(owner) drops all its jobs
  uint64_t id = 0;     // Drop(owner, id) drops this one
  std::vector<Window> windows;
  uint32_t layers = 0;      // bit i = i-th Engram layer
  int priority = 0;         // class
  bool past_cache = false;  // reads from the drive what the cache holds as well
  int64_t deadline_ns = 0;  // CLOCK_MONOTONIC; 0 = none
  // Per layer: weights [window][owned column][row_weight_bytes] and scales; both null to read
  // without a destination (a hint).
  struct Destination {
    uint8_t* weights = nullptr;
    uint8_t* scales = nullptr;
  };
  std::array<Destination, kMaxLayers> destinations{};
  bool destinations_empty() const {
    return std::all_of(destinations.begin(), destinations.end(),
                       [](const Destination& d) { return d.weights == nullptr; });
  }
  // Called once per requested layer; must not call the engine. After it the engine writes no more
  // to that layer's destination.
  std::function<void(int layer_idx, GatherStatus status, const std::string& error)> done;
};

struct GatherStats {
  uint64_t jobs = 0;
  uint64_t tokens = 0;
  uint64_t dead_tokens = 0;
  uint64_t rows = 0;               // wanted, per layer and column
  uint64_t rows_deduplicated = 0;  // pieces that found their block already on its way
  uint64_t reads = 0;              // blocks
  uint64_t read_bytes = 0;
  uint64_t retries = 0;
  uint64_t data_errors = 0;     // blocks given up, rows with invalid codes
  uint64_t check_failures = 0;  // checksum or identity of a page
  uint64_t timeouts = 0;
  RowCacheStats cache;
  uint64_t cache_entries = 0;
  uint64_t cache_bytes = 0;
  uint64_t cache_capacity = 0;   // entries
  uint64_t cache_usable = 0;     // of them, memory is there
  int cache_populate_error = 0;  // errno when it will never be all
  std::string last_error;
};

class GatherEngine {
 public:
  // All outlive the engine; `cache` may be null.
  GatherEngine(const TableSet& tables, BlockReader& reader, RowCache* cache = nullptr);

  // Takes a job; its layers may be reported before this returns.
  void Start(GatherJob job);
  // Reaps, submits, copies, reports, retries: a few finished reads at a time, so that the drive
  // never waits long for its next ones. With `wait` it blocks for a finished read if there is none
  // and any is on its way. Returns whether anything happened.
  bool Poll(bool wait);
  // Drops the owner's jobs without reporting them; their destinations are not touched any more.
  void Cancel(uint64_t owner);
  // Drops one job (a hint) without reporting it, and takes back what only it wanted and the reader
  // does not have yet. Walks everything that waits for the reader.
  void Drop(uint64_t owner, uint64_t id);

  // A request of class 1 has waited that long for its first row; above kQueueAgeNsMax that is
  // overload, which meters() tell.
  void NoteQueueAge(int64_t age_ns, int64_t now_ns);

  // Whether a job without destinations is of any use: its rows stay in the cache, or other jobs
  // join its reads while they are on their way.
  bool reads_ahead() const { return cache_ != nullptr || reader_.event_fd() >= 0; }
  size_t reads_in_flight() const { return reader_.in_flight(); }
  bool idle() const { return num_jobs_ == 0 && blocks_in_flight_.empty(); }
  size_t num_jobs() const { return num_jobs_; }
  // When Poll has something to do without any read finishing: the nearest deadline or retry;
  // INT64_MAX when there is none.
  int64_t NextEventNs() const;
  GatherStats stats() const;
  // Reading them is thread-safe; writing is for the owner thread (sessions count their part).
  GatherMeters& meters() { return meters_; }
  const GatherMeters& meters() const { return meters_; }
  // A layer whose file shrank or was written to is not served any more: why, or empty.
  const std::string& layer_failure(int layer_idx) const {
    return failures_[static_cast<size_t>(layer_idx)];
  }
  // Compares the open files with what they were; every layer does so before it is reported.
  void CheckTables();

 private:
  static constexpr uint32_t kNone = UINT32_MAX;

  // A job with its open layers. The slot lives until no row refers to it, also when its layers were
  // reported early (deadline, failure, cancel): nothing is copied for a layer that is not open.
  struct JobSlot {
    GatherJob job;
    bool used = false;
    bool dropped = false;
    std::array<uint32_t, kMaxLayers> rows_left{};
    uint32_t rows_left_total = 0;
    uint32_t layers_open = 0;
    // Of class 1, with destinations: no row of it has come yet, and when to look at its age.
    bool waits = false;
    int64_t started_ns = 0;
    int64_t look_ns = 0;
  };
  // A row on its way to one destination.
  struct RowSlot {
    uint32_t job = 0;
    uint8_t layer_idx = 0;
    uint8_t parts_left = 0;
    bool failed = false;
    uint32_t row_idx = 0;  // window * owned columns + owned column
    uint8_t cache_head = 0;
    RowCache::Ref cached;  // entry this row fills, if it is still there
  };
  // Bytes of a block that belong to a row.
  struct Part {
    uint32_t row = 0;
    uint16_t block_byte = 0;
    uint16_t bytes = 0;
    uint16_t row_byte = 0;
    uint32_t next = 0;  // list of the block; kNone ends it
  };
  struct BlockSlot {
    uint64_t key = 0;
    uint8_t layer_idx = 0;
    uint8_t priority = 0;
    uint8_t attempts = 0;
    bool submitted = false;
    bool low = false;  // submitted as a read of class 1 or 2
    uint16_t file_idx = 0;
    uint64_t block_idx = 0;
    uint32_t first_part = 0;
    uint32_t bytes_in_file = 0;  // 4096 except in a file's last block
    int64_t submitted_ns = 0;
  };

  // Takes a free slot of a pool or appends one.
  template <typename T>
  static uint32_t TakeSlot(std::vector<T>& pool, std::vector<uint32_t>& free) {
    if (free.empty()) {
      pool.emplace_back();
      return static_cast<uint32_t>(pool.size() - 1);
    }
    const uint32_t slot = free.back();
    free.pop_back();
    pool[slot] = T{};
    return slot;
  }

  // Where a row that has to be read goes: its place in the job and in the cache.
  struct RowTarget {
    uint32_t job = 0;
    int layer_idx = 0;
    uint32_t row_idx = 0;
    RowCache::Ref cached;
    uint32_t cache_head = 0;
  };
  void StartChunk(uint32_t job_idx, uint32_t layers);
  void StartNgram(uint32_t job_idx, uint32_t window_idx, uint32_t order, uint32_t layers);
  RowCache::Ref ProbeCache(const Window& window, uint32_t order);
  bool CopyFromCache(
      uint32_t job_idx, size_t window_idx, int layer_idx, uint32_t order_idx, RowCache::Ref ref);
  void AddRow(const RowTarget& target, int column, uint32_t bucket);
  void AddPart(uint32_t row,
               int layer_idx,
               int priority,
               uint32_t file_idx,
               uint64_t block_idx,
               const Part& part);
  void SubmitQueued();
  void NoteFinished(const BlockDone& done, int64_t now);
  void Complete(const BlockDone& done);
  void Retry(uint32_t slot, const std::string& error);
  void FinishParts(uint32_t slot, std::span<const uint8_t> data, const std::string* error);
  void FinishRow(uint32_t row, const std::string* error);
  void FinishLayer(uint32_t job_idx, int layer_idx, GatherStatus status, const std::string& error);
  void FailLayer(int layer_idx, const std::string& error);
  void CheckDeadlines();
  void ReleaseJobIfDone(uint32_t job_idx);
  LayerClassMeters& Meters(int layer_idx, int priority) {
    return meters_.layers[static_cast<size_t>(layer_idx)][static_cast<size_t>(priority)];
  }
  bool OnlyDroppedJobsWant(const BlockSlot& block) const;
  void FillDeadRows(const GatherJob& job, int layer_idx) const;

  const TableSet& tables_;
  BlockReader& reader_;
  RowCache* const cache_;
  const uint32_t num_orders_;
  const uint32_t heads_;  // owned heads per order
  GatherStats stats_;
  GatherMeters meters_;
  std::array<std::string, kMaxLayers> failures_;

  std::vector<JobSlot> jobs_;
  std::vector<uint32_t> free_jobs_;
  size_t num_jobs_ = 0;
  size_t num_urgent_jobs_ = 0;  // class 0
  size_t low_in_flight_ = 0;    // submitted reads of classes 1 and 2
  std::vector<RowSlot> rows_;
  std::vector<uint32_t> free_rows_;
  std::vector<Part> parts_;
  std::vector<uint32_t> free_parts_;
  std::vector<BlockSlot> blocks_;
  std::vector<uint32_t> free_blocks_;
  absl::flat_hash_map<uint64_t, uint32_t> blocks_in_flight_;  // layer and block > slot
  // Waiting for a place in the reader, by class and then layer: urgent first, layer 1 before 14.
  std::array<std::array<std::deque<uint32_t>, kMaxLayers>, kNumClasses> queued_;
  std::multimap<int64_t, uint32_t> retries_;  // due time > block slot
};

// CLOCK_MONOTONIC in nanoseconds.
int64_t MonotonicNs();

}  // namespace twinspark::engram
