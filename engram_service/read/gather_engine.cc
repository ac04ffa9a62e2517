// Order of events for a block: AddPart puts it into the map and a queue; SubmitQueued hands it to
// the reader as places come free; Complete copies its parts or retries it; FinishParts takes it out
// of the map. Rows count their parts, layers count their rows.
#include "engram_service/read/gather_engine.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <utility>

#include <sys/stat.h>

#include "absl/strings/str_cat.h"

#include "common/check.h"

namespace twinspark::engram {
namespace {

constexpr uint32_t kNone = UINT32_MAX;
constexpr std::array<int64_t, 3> kRetryDelayNs = {1'000'000, 5'000'000, 20'000'000};
constexpr size_t kReapBatch = 64;

uint64_t BlockKey(int layer_idx, uint64_t block_idx) {
  return (static_cast<uint64_t>(layer_idx) << 56) | block_idx;
}

// Takes a free slot of a pool or appends one.
template <typename T>
uint32_t TakeSlot(std::vector<T>& pool, std::vector<uint32_t>& free) {
  if (free.empty()) {
    pool.emplace_back();
    return static_cast<uint32_t>(pool.size() - 1);
  }
  const uint32_t slot = free.back();
  free.pop_back();
  pool[slot] = T{};
  return slot;
}

}  // namespace

int64_t MonotonicNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

GatherEngine::GatherEngine(const TableSet& tables, BlockReader& reader)
    : tables_(tables), reader_(reader) {
  CHECK_LE(tables.num_layers(), kMaxLayers);
  buckets_.resize(tables.columns().size());
}

void GatherEngine::FillDeadRows(const GatherJob& job, int layer_idx, size_t window_idx) const {
  const auto& destination = job.destinations[static_cast<size_t>(layer_idx)];
  if (destination.weights == nullptr) return;
  const RowTable& table = tables_.table(layer_idx);
  const size_t columns = tables_.columns().size();
  const size_t weight_bytes = columns * table.row_weight_bytes();
  const size_t scale_bytes = columns * table.row_scale_bytes();
  memset(destination.weights + window_idx * weight_bytes, 0, weight_bytes);
  memset(destination.scales + window_idx * scale_bytes, 127, scale_bytes);
}

void GatherEngine::Start(GatherJob new_job) {
  const uint32_t job_idx = TakeSlot(jobs_, free_jobs_);
  JobSlot& slot = jobs_[job_idx];
  slot.job = std::move(new_job);
  slot.used = true;
  slot.layers_open = slot.job.layers;
  ++num_jobs_;
  if (slot.job.priority == 0) ++num_urgent_jobs_;
  ++stats_.jobs;
  stats_.tokens += slot.job.windows.size();

  const size_t columns = tables_.columns().size();
  size_t live = 0;
  for (const Window& window : slot.job.windows)
    live += window.live ? 1 : 0;
  stats_.dead_tokens += slot.job.windows.size() - live;
  for (int layer_idx = 0; layer_idx < tables_.num_layers(); ++layer_idx) {
    if ((slot.job.layers >> layer_idx & 1) == 0) continue;
    const size_t l = static_cast<size_t>(layer_idx);
    if (failed_[l]) {
      FinishLayer(job_idx, layer_idx, GatherStatus::kDataError,
                  absl::StrCat(tables_.table(layer_idx).path(), " is truncated"));
      continue;
    }
    slot.rows_left[l] = static_cast<uint32_t>(live * columns);
    slot.rows_left_total += slot.rows_left[l];
  }
  for (int layer_idx = 0; layer_idx < tables_.num_layers(); ++layer_idx) {
    if ((jobs_[job_idx].layers_open >> layer_idx & 1) == 0) continue;
    const GatherJob& job = jobs_[job_idx].job;
    for (size_t i = 0; i < job.windows.size(); ++i) {
      if (!job.windows[i].live) {
        FillDeadRows(job, layer_idx, i);
        continue;
      }
      tables_.hasher().Buckets(layer_idx, job.windows[i], tables_.columns(), buckets_);
      for (size_t c = 0; c < columns; ++c) {
        AddRow(job_idx, layer_idx, static_cast<uint32_t>(i * columns + c), tables_.columns()[c],
               buckets_[c]);
      }
    }
    if (live == 0) FinishLayer(job_idx, layer_idx, GatherStatus::kOk, "");
  }
  ReleaseJobIfDone(job_idx);
  SubmitQueued();
}

void GatherEngine::AddRow(
    uint32_t job_idx, int layer_idx, uint32_t row_idx, int column, uint32_t bucket) {
  ++stats_.rows;
  const uint32_t row = TakeSlot(rows_, free_rows_);
  rows_[row].job = job_idx;
  rows_[row].layer_idx = static_cast<uint8_t>(layer_idx);
  rows_[row].row_idx = row_idx;
  const RowPlace place = tables_.table(layer_idx).Locate(column, bucket);
  const int priority = jobs_[job_idx].job.priority;
  for (int i = 0; i < place.num_pieces; ++i) {
    const RowPiece& piece = place.pieces[static_cast<size_t>(i)];
    // A piece may cross a block border.
    for (uint32_t done = 0; done < piece.bytes;) {
      const uint64_t offset = piece.offset + done;
      Part part;
      part.row = row;
      part.block_byte = static_cast<uint16_t>(offset % kBlockBytes);
      part.bytes = static_cast<uint16_t>(
          std::min<uint64_t>(piece.bytes - done, kBlockBytes - part.block_byte));
      part.row_byte = static_cast<uint16_t>(piece.row_byte + done);
      AddPart(row, layer_idx, priority, offset / kBlockBytes, part);
      done += part.bytes;
    }
  }
}

void GatherEngine::AddPart(
    uint32_t row, int layer_idx, int priority, uint64_t block_idx, const Part& new_part) {
  ++rows_[row].parts_left;
  const uint32_t part = TakeSlot(parts_, free_parts_);
  parts_[part] = new_part;
  parts_[part].next = kNone;
  const uint64_t key = BlockKey(layer_idx, block_idx);
  const auto [it, inserted] = blocks_in_flight_.try_emplace(key, kNone);
  if (!inserted) {
    BlockSlot& block = blocks_[it->second];
    if (parts_[block.first_part].row != row) ++stats_.rows_deduplicated;
    parts_[part].next = block.first_part;
    block.first_part = part;
    if (block.submitted || priority >= block.priority) return;
    // More urgent than what asked for it first: queue it again; the older entry is skipped later.
    block.priority = static_cast<uint8_t>(priority);
  } else {
    const uint32_t slot = TakeSlot(blocks_, free_blocks_);
    it->second = slot;
    BlockSlot& block = blocks_[slot];
    block.key = key;
    block.layer_idx = static_cast<uint8_t>(layer_idx);
    block.priority = static_cast<uint8_t>(priority);
    block.block_idx = block_idx;
    block.first_part = part;
    const uint64_t file_bytes = tables_.table(layer_idx).file_bytes();
    const uint64_t begin = block_idx * kBlockBytes;
    CHECK_LT(begin, file_bytes) << "row outside " << tables_.table(layer_idx).path();
    block.bytes_in_file =
        static_cast<uint32_t>(std::min<uint64_t>(kBlockBytes, file_bytes - begin));
  }
  queued_[static_cast<size_t>(priority)][static_cast<size_t>(layer_idx)].push_back(it->second);
}

void GatherEngine::SubmitQueued() {
  // While decode waits, bulk reads leave it a quarter of the places.
  const size_t low_limit = num_urgent_jobs_ > 0 ? reader_.depth() * 3 / 4 : reader_.depth();
  bool submitted = false;
  for (size_t priority = 0; priority < kNumClasses; ++priority) {
    for (auto& queue : queued_[priority]) {
      while (!queue.empty() && reader_.in_flight() < reader_.depth() &&
             (priority == 0 || low_in_flight_ < low_limit)) {
        const uint32_t slot = queue.front();
        queue.pop_front();
        BlockSlot& block = blocks_[slot];
        if (block.submitted || block.first_part == kNone) continue;
        block.submitted = true;
        if (block.priority > 0) ++low_in_flight_;
        reader_.Submit(
            {tables_.table(block.layer_idx).fd(), block.block_idx, block.bytes_in_file, slot});
        submitted = true;
      }
    }
  }
  if (submitted) reader_.Flush();
}

bool GatherEngine::Poll(bool wait) {
  bool progress = false;
  CheckDeadlines();
  const int64_t now = retries_.empty() ? 0 : MonotonicNs();
  while (!retries_.empty() && retries_.begin()->first <= now) {
    const BlockSlot& block = blocks_[retries_.begin()->second];
    queued_[block.priority][block.layer_idx].push_front(retries_.begin()->second);
    retries_.erase(retries_.begin());
    progress = true;
  }
  SubmitQueued();
  if (reader_.in_flight() == 0) return progress;
  std::array<BlockDone, kReapBatch> done;
  const size_t count = reader_.Reap(done, wait);
  for (size_t i = 0; i < count; ++i) {
    Complete(done[i]);
    reader_.Release(done[i].buffer);
  }
  if (count > 0) SubmitQueued();
  return progress || count > 0;
}

void GatherEngine::Complete(const BlockDone& done) {
  const uint32_t slot = static_cast<uint32_t>(done.tag);
  BlockSlot& block = blocks_[slot];
  block.submitted = false;
  if (block.priority > 0) --low_in_flight_;
  const RowTable& table = tables_.table(block.layer_idx);
  ++stats_.reads;
  stats_.read_bytes += done.bytes;
  if (done.error != 0) {
    Retry(slot, absl::StrCat(table.path(), " block ", block.block_idx, ": ", strerror(done.error)));
    return;
  }
  if (done.bytes < block.bytes_in_file) {
    struct stat info;
    const bool shrank =
        fstat(table.fd(), &info) == 0 && static_cast<uint64_t>(info.st_size) < table.file_bytes();
    const std::string error =
        absl::StrCat(table.path(), " block ", block.block_idx, ": ", done.bytes, " of ",
                     block.bytes_in_file, " bytes", shrank ? ", the file was truncated" : "");
    if (shrank) {
      FailLayer(block.layer_idx, error);
      FinishParts(slot, {}, &error);
    } else {
      Retry(slot, error);
    }
    return;
  }
  const absl::Status checked = table.CheckBlock(block.block_idx, done.data);
  if (!checked.ok()) {
    ++stats_.check_failures;
    Retry(slot, absl::StrCat(table.path(), " block ", block.block_idx, ": ", checked.message()));
    return;
  }
  FinishParts(slot, done.data, nullptr);
}

void GatherEngine::Retry(uint32_t slot, const std::string& error) {
  BlockSlot& block = blocks_[slot];
  stats_.last_error = error;
  if (block.attempts >= kRetryDelayNs.size()) {
    ++stats_.data_errors;
    FinishParts(slot, {}, &error);
    return;
  }
  ++stats_.retries;
  retries_.emplace(MonotonicNs() + kRetryDelayNs[block.attempts++], slot);
}

void GatherEngine::FinishParts(uint32_t slot,
                               std::span<const uint8_t> data,
                               const std::string* error) {
  const BlockSlot block = blocks_[slot];
  blocks_in_flight_.erase(block.key);
  blocks_[slot].first_part = kNone;
  free_blocks_.push_back(slot);
  const uint32_t weight_bytes = tables_.table(block.layer_idx).row_weight_bytes();
  const uint32_t scale_bytes = tables_.table(block.layer_idx).row_scale_bytes();
  for (uint32_t i = block.first_part; i != kNone;) {
    const Part part = parts_[i];
    free_parts_.push_back(i);
    i = part.next;
    RowSlot& row = rows_[part.row];
    const JobSlot& job = jobs_[row.job];
    const auto& destination = job.job.destinations[row.layer_idx];
    const bool open = (job.layers_open >> row.layer_idx & 1) != 0;
    if (error == nullptr && open && destination.weights != nullptr) {
      uint8_t* to = part.row_byte < weight_bytes
                        ? destination.weights + size_t{row.row_idx} * weight_bytes + part.row_byte
                        : destination.scales + size_t{row.row_idx} * scale_bytes +
                              (part.row_byte - weight_bytes);
      memcpy(to, &data[part.block_byte], part.bytes);
    }
    row.failed = row.failed || error != nullptr;
    if (--row.parts_left == 0) FinishRow(part.row, error);
  }
}

void GatherEngine::FinishRow(uint32_t row_slot, const std::string* error) {
  const RowSlot row = rows_[row_slot];
  free_rows_.push_back(row_slot);
  JobSlot& job = jobs_[row.job];
  --job.rows_left[row.layer_idx];
  --job.rows_left_total;
  const bool open = (job.layers_open >> row.layer_idx & 1) != 0;
  if (open && row.failed) {
    FinishLayer(row.job, row.layer_idx, GatherStatus::kDataError,
                error != nullptr ? *error : stats_.last_error);
  } else if (open) {
    const RowTable& table = tables_.table(row.layer_idx);
    const auto& destination = job.job.destinations[row.layer_idx];
    if (destination.weights != nullptr &&
        HasInvalidCode({destination.weights + size_t{row.row_idx} * table.row_weight_bytes(),
                        table.row_weight_bytes()},
                       {destination.scales + size_t{row.row_idx} * table.row_scale_bytes(),
                        table.row_scale_bytes()})) {
      ++stats_.data_errors;
      stats_.last_error =
          absl::StrCat(table.path(), ": a row of token ", row.row_idx / tables_.columns().size(),
                       " has a NaN code or scale 255");
      FinishLayer(row.job, row.layer_idx, GatherStatus::kDataError, stats_.last_error);
    } else if (job.rows_left[row.layer_idx] == 0) {
      FinishLayer(row.job, row.layer_idx, GatherStatus::kOk, "");
    }
  }
  ReleaseJobIfDone(row.job);
}

void GatherEngine::FinishLayer(uint32_t job_idx,
                               int layer_idx,
                               GatherStatus status,
                               const std::string& error) {
  JobSlot& slot = jobs_[job_idx];
  if ((slot.layers_open >> layer_idx & 1) == 0) return;
  slot.layers_open &= ~(1u << layer_idx);
  if (status == GatherStatus::kTimeout) ++stats_.timeouts;
  if (slot.job.done) slot.job.done(layer_idx, status, error);
}

void GatherEngine::ReleaseJobIfDone(uint32_t job_idx) {
  JobSlot& slot = jobs_[job_idx];
  if (!slot.used || slot.layers_open != 0 || slot.rows_left_total != 0) return;
  slot.used = false;
  --num_jobs_;
  if (slot.job.priority == 0) --num_urgent_jobs_;
  slot.job = GatherJob{};
  free_jobs_.push_back(job_idx);
}

void GatherEngine::FailLayer(int layer_idx, const std::string& error) {
  failed_[static_cast<size_t>(layer_idx)] = true;
  stats_.last_error = error;
  ++stats_.data_errors;
  for (uint32_t i = 0; i < jobs_.size(); ++i) {
    if (jobs_[i].used) FinishLayer(i, layer_idx, GatherStatus::kDataError, error);
  }
}

void GatherEngine::CheckDeadlines() {
  if (num_jobs_ == 0) return;
  const int64_t now = MonotonicNs();
  for (uint32_t i = 0; i < jobs_.size(); ++i) {
    const JobSlot& slot = jobs_[i];
    if (!slot.used || slot.layers_open == 0 || slot.job.deadline_ns == 0 ||
        now < slot.job.deadline_ns) {
      continue;
    }
    for (int layer_idx = 0; layer_idx < tables_.num_layers(); ++layer_idx) {
      FinishLayer(i, layer_idx, GatherStatus::kTimeout, "rows were not there at the deadline");
    }
    ReleaseJobIfDone(i);
  }
}

void GatherEngine::Cancel(uint64_t owner) {
  for (uint32_t i = 0; i < jobs_.size(); ++i) {
    JobSlot& slot = jobs_[i];
    if (!slot.used || slot.job.owner != owner) continue;
    slot.layers_open = 0;
    slot.job.done = nullptr;
    ReleaseJobIfDone(i);
  }
}

int64_t GatherEngine::NextEventNs() const {
  int64_t next = INT64_MAX;
  if (!retries_.empty()) next = retries_.begin()->first;
  for (const JobSlot& slot : jobs_) {
    if (slot.used && slot.layers_open != 0 && slot.job.deadline_ns != 0) {
      next = std::min(next, slot.job.deadline_ns);
    }
  }
  return next;
}

}  // namespace twinspark::engram
