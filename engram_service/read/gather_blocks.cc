// Blocks of the gather engine (gather_engine.h). Order of events for one: AddPart puts it into the
// map and a queue; SubmitQueued hands it to the reader as places come free; Complete copies its
// parts or retries it; FinishParts takes it out of the map. Rows count their parts.
#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include <sys/stat.h>

#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "engram_service/read/gather_engine.h"

namespace twinspark::engram {
namespace {

constexpr std::array<int64_t, 3> kRetryDelayNs = {1'000'000, 5'000'000, 20'000'000};

uint64_t BlockKey(int layer_idx, uint32_t file_idx, uint64_t block_idx) {
  return (static_cast<uint64_t>(layer_idx) << 56) | (uint64_t{file_idx} << 44) | block_idx;
}

}  // namespace

void GatherEngine::AddRow(const RowTarget& target, int column, uint32_t bucket) {
  const uint32_t row = TakeSlot(rows_, free_rows_);
  rows_[row].job = target.job;
  rows_[row].layer_idx = static_cast<uint8_t>(target.layer_idx);
  rows_[row].row_idx = target.row_idx;
  rows_[row].cached = target.cached;
  rows_[row].cache_head = static_cast<uint8_t>(target.cache_head);
  const RowPlace place = tables_.table(target.layer_idx).Locate(column, bucket);
  const int priority = jobs_[target.job].job.priority;
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
      AddPart(row, target.layer_idx, priority, piece.file_idx, offset / kBlockBytes, part);
      done += part.bytes;
    }
  }
}

void GatherEngine::AddPart(uint32_t row,
                           int layer_idx,
                           int priority,
                           uint32_t file_idx,
                           uint64_t block_idx,
                           const Part& new_part) {
  ++rows_[row].parts_left;
  const uint32_t part = TakeSlot(parts_, free_parts_);
  parts_[part] = new_part;
  parts_[part].next = kNone;
  const uint64_t key = BlockKey(layer_idx, file_idx, block_idx);
  const auto [it, inserted] = blocks_in_flight_.try_emplace(key, kNone);
  if (!inserted) {
    BlockSlot& block = blocks_[it->second];
    if (parts_[block.first_part].row != row) {
      ++stats_.rows_deduplicated;
      Meters(layer_idx, priority).rows_deduplicated.Add();
    }
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
    block.file_idx = static_cast<uint16_t>(file_idx);
    const TableFile& file = tables_.table(layer_idx).file(file_idx);
    const uint64_t file_bytes = file.bytes;
    const uint64_t begin = block_idx * kBlockBytes;
    CHECK_LT(begin, file_bytes) << "row outside " << file.path;
    block.bytes_in_file =
        static_cast<uint32_t>(std::min<uint64_t>(kBlockBytes, file_bytes - begin));
  }
  queued_[static_cast<size_t>(priority)][static_cast<size_t>(layer_idx)].push_back(it->second);
}

void GatherEngine::SubmitQueued() {
  // While decode waits, bulk reads leave it a quarter of the places.
  const size_t low_limit = num_urgent_jobs_ > 0 ? reader_.depth() * 3 / 4 : reader_.depth();
  int64_t now = 0;  // of this batch; 0 = nothing submitted
  for (size_t priority = 0; priority < kNumClasses; ++priority) {
    for (auto& queue : queued_[priority]) {
      while (!queue.empty() && reader_.in_flight() < reader_.depth() &&
             (priority == 0 || low_in_flight_ < low_limit)) {
        const uint32_t slot = queue.front();
        queue.pop_front();
        BlockSlot& block = blocks_[slot];
        if (block.submitted || block.first_part == kNone) continue;
        if (now == 0) now = MonotonicNs();
        block.submitted = true;
        block.submitted_ns = now;
        block.low = block.priority > 0;
        if (block.low) ++low_in_flight_;
        reader_.Submit({tables_.table(block.layer_idx).file(block.file_idx).fd.get(),
                        block.block_idx, block.bytes_in_file, slot});
      }
    }
  }
  if (now == 0) return;
  meters_.depth.Observe(reader_.in_flight());
  meters_.in_flight.Set(reader_.in_flight());
  reader_.Flush();
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
  std::array<BlockDone, kReapMax> done;
  const size_t count = reader_.Reap(done, wait);
  if (count == 0) return progress;
  const int64_t reaped_ns = MonotonicNs();
  for (const BlockDone& block : std::span(done).first(count))
    NoteFinished(block, reaped_ns);
  meters_.in_flight.Set(reader_.in_flight());
  // The drive gets its next reads before these are looked at (some 5 us of copying and checking).
  SubmitQueued();
  for (const BlockDone& block : std::span(done).first(count)) {
    Complete(block);
    reader_.Release(block.buffer);
  }
  return true;
}

void GatherEngine::NoteFinished(const BlockDone& done, int64_t now) {
  const BlockSlot& block = blocks_[static_cast<uint32_t>(done.tag)];
  if (block.low) --low_in_flight_;
  meters_.read_ns.Observe(static_cast<uint64_t>(now - block.submitted_ns));
}

void GatherEngine::Complete(const BlockDone& done) {
  const uint32_t slot = static_cast<uint32_t>(done.tag);
  BlockSlot& block = blocks_[slot];
  block.submitted = false;
  const RowTable& table = tables_.table(block.layer_idx);
  const TableFile& file = table.file(block.file_idx);
  ++stats_.reads;
  stats_.read_bytes += done.bytes;
  LayerClassMeters& meters = Meters(block.layer_idx, block.priority);
  meters.reads.Add();
  meters.read_bytes.Add(done.bytes);
  if (done.error != 0) {
    Retry(slot, absl::StrCat(file.path, " block ", block.block_idx, ": ", strerror(done.error)));
    return;
  }
  if (done.bytes < block.bytes_in_file) {
    struct stat info;
    const bool shrank =
        fstat(file.fd.get(), &info) == 0 && static_cast<uint64_t>(info.st_size) < file.bytes;
    const std::string error =
        absl::StrCat(file.path, " block ", block.block_idx, ": ", done.bytes, " of ",
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
    meters.check_failures.Add();
    Retry(slot, absl::StrCat(file.path, " block ", block.block_idx, ": ", checked.message()));
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
  Meters(block.layer_idx, block.priority).retries.Add();
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
    const auto copy_to = [&](uint8_t* weights, uint8_t* scales) {
      uint8_t* to = part.row_byte < weight_bytes ? weights + part.row_byte
                                                 : scales + (part.row_byte - weight_bytes);
      memcpy(to, &data[part.block_byte], part.bytes);
    };
    if (error == nullptr && open && destination.weights != nullptr) {
      copy_to(destination.weights + size_t{row.row_idx} * weight_bytes,
              destination.scales + size_t{row.row_idx} * scale_bytes);
    }
    if (error == nullptr && cache_ != nullptr && cache_->alive(row.cached)) {
      copy_to(cache_->Weights(row.cached, row.layer_idx) + size_t{row.cache_head} * weight_bytes,
              cache_->Scales(row.cached, row.layer_idx) + size_t{row.cache_head} * scale_bytes);
    }
    row.failed = row.failed || error != nullptr;
    if (--row.parts_left == 0) FinishRow(part.row, error);
  }
}

void GatherEngine::FinishRow(uint32_t row_slot, const std::string* error) {
  const RowSlot row = rows_[row_slot];
  free_rows_.push_back(row_slot);
  JobSlot& job = jobs_[row.job];
  job.waits = false;
  --job.rows_left[row.layer_idx];
  --job.rows_left_total;
  const bool open = (job.layers_open >> row.layer_idx & 1) != 0;
  const RowTable& table = tables_.table(row.layer_idx);
  const uint32_t weight_bytes = table.row_weight_bytes();
  const uint32_t scale_bytes = table.row_scale_bytes();
  const auto& destination = job.job.destinations[row.layer_idx];
  bool invalid = false;
  if (!row.failed && cache_ != nullptr && cache_->alive(row.cached)) {
    invalid = HasInvalidCode(
        {cache_->Weights(row.cached, row.layer_idx) + size_t{row.cache_head} * weight_bytes,
         weight_bytes},
        {cache_->Scales(row.cached, row.layer_idx) + size_t{row.cache_head} * scale_bytes,
         scale_bytes});
    if (!invalid) cache_->MarkFilled(row.cached, row.layer_idx, row.cache_head);
  } else if (!row.failed && open && destination.weights != nullptr) {
    invalid =
        HasInvalidCode({destination.weights + size_t{row.row_idx} * weight_bytes, weight_bytes},
                       {destination.scales + size_t{row.row_idx} * scale_bytes, scale_bytes});
  }
  if (invalid) {
    ++stats_.data_errors;
    stats_.last_error =
        absl::StrCat(table.path(), ": a row of token ", row.row_idx / tables_.columns().size(),
                     " has a NaN code or scale 255");
  }
  if (open && (row.failed || invalid)) {
    FinishLayer(row.job, row.layer_idx, GatherStatus::kDataError,
                error != nullptr ? *error : stats_.last_error);
  } else if (open && job.rows_left[row.layer_idx] == 0) {
    FinishLayer(row.job, row.layer_idx, GatherStatus::kOk, "");
  }
  ReleaseJobIfDone(row.job);
}

bool GatherEngine::OnlyDroppedJobsWant(const BlockSlot& block) const {
  for (uint32_t i = block.first_part; i != kNone; i = parts_[i].next) {
    if (!jobs_[rows_[parts_[i].row].job].dropped) return false;
  }
  return true;
}

void GatherEngine::Drop(uint64_t owner, uint64_t id) {
  const auto found = std::find_if(jobs_.begin(), jobs_.end(), [&](const JobSlot& slot) {
    return slot.used && !slot.dropped && slot.job.owner == owner && slot.job.id == id;
  });
  if (found == jobs_.end()) return;
  found->dropped = true;
  found->layers_open = 0;
  found->job.done = nullptr;
  const std::string dropped = "dropped";  // nobody is told: no layer of these rows is open
  for (auto& queues : queued_) {
    for (auto& queue : queues) {
      std::erase_if(queue, [&](uint32_t slot) {
        const BlockSlot& block = blocks_[slot];
        if (block.first_part == kNone) return true;
        if (block.submitted || !OnlyDroppedJobsWant(block)) return false;
        FinishParts(slot, {}, &dropped);
        return true;
      });
    }
  }
  ReleaseJobIfDone(static_cast<uint32_t>(found - jobs_.begin()));
}

}  // namespace twinspark::engram
