// Jobs: what one asks for, n-gram by n-gram, and how its layers end; gather_blocks.cc reads what
// the cache does not have. Layers count their rows.
#include "engram_service/read/gather_engine.h"

#include <algorithm>
#include <cstring>
#include <ctime>
#include <utility>

#include "common/check.h"

namespace twinspark::engram {
namespace {

constexpr uint32_t kStarted = UINT32_MAX - 1;
constexpr uint32_t kWindowsOfChunk = 64;  // from here on, hashing overlaps with reading
constexpr size_t kWindowsPerTurn = 1;

NgramKey KeyOf(const Window& window, uint32_t order) {
  NgramKey key;
  key.order = order;
  std::copy_n(window.ids.begin(), order, key.ids.begin());
  return key;
}

}  // namespace

int64_t MonotonicNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

// Columns ascend and every order has the same number of owned heads: the balanced split.
GatherEngine::GatherEngine(const TableSet& tables, BlockReader& reader, RowCache* cache)
    : tables_(tables),
      reader_(reader),
      cache_(cache),
      num_orders_(static_cast<uint32_t>(tables.shape().max_ngram_size - 1)),
      heads_(static_cast<uint32_t>(tables.columns().size()) / num_orders_) {
  CHECK_LE(tables.num_layers(), kMaxLayers);
  if (cache != nullptr) {
    CHECK_EQ(cache->shape().heads, heads_);
    CHECK_EQ(cache->shape().layers, static_cast<uint32_t>(tables.num_layers()));
  }
}

GatherStats GatherEngine::stats() const {
  GatherStats stats = stats_;
  if (cache_ != nullptr) {
    stats.cache = cache_->stats();
    stats.cache_entries = cache_->size();
    stats.cache_bytes = cache_->arena_bytes();
    stats.cache_capacity = cache_->capacity();
    stats.cache_usable = cache_->usable();
    stats.cache_populate_error = cache_->populate_error();
  }
  return stats;
}

// Dead tokens have no rows: harmless bytes, because their gate is zero.
void GatherEngine::FillDeadRows(const GatherJob& job, int layer_idx) const {
  const auto& destination = job.destinations[static_cast<size_t>(layer_idx)];
  if (destination.weights == nullptr) return;
  const RowTable& table = tables_.table(layer_idx);
  const size_t columns = tables_.columns().size();
  const size_t weight_bytes = columns * table.row_weight_bytes();
  const size_t scale_bytes = columns * table.row_scale_bytes();
  for (size_t i = 0; i < job.windows.size(); ++i) {
    if (job.windows[i].live) continue;
    memset(destination.weights + i * weight_bytes, 0, weight_bytes);
    memset(destination.scales + i * scale_bytes, 127, scale_bytes);
  }
}

void GatherEngine::Start(GatherJob new_job) {
  const uint32_t job_idx = TakeSlot(jobs_, free_jobs_);
  JobSlot& slot = jobs_[job_idx];
  slot.job = std::move(new_job);
  slot.used = true;
  slot.layers_open = slot.job.layers;
  ++num_jobs_;
  if (slot.job.priority == 0) ++num_urgent_jobs_;
  slot.waits = slot.job.priority == 1 && !slot.job.destinations_empty();
  if (slot.waits) {
    slot.started_ns = MonotonicNs();
    slot.look_ns = slot.started_ns + kQueueAgeNsMax;
  }
  ++stats_.jobs;
  stats_.tokens += slot.job.windows.size();

  const size_t columns = tables_.columns().size();
  size_t live = 0;
  for (const Window& window : slot.job.windows)
    live += window.live ? 1 : 0;
  stats_.dead_tokens += slot.job.windows.size() - live;
  meters_.classes[static_cast<size_t>(slot.job.priority)].dead_tokens.Add(slot.job.windows.size() -
                                                                          live);
  for (int layer_idx = 0; layer_idx < tables_.num_layers(); ++layer_idx) {
    if ((slot.job.layers >> layer_idx & 1) == 0) continue;
    const size_t l = static_cast<size_t>(layer_idx);
    if (!failures_[l].empty()) {
      FinishLayer(job_idx, layer_idx, GatherStatus::kDataError, failures_[l]);
      continue;
    }
    slot.rows_left[l] = static_cast<uint32_t>(live * columns);
    slot.rows_left_total += slot.rows_left[l];
    Meters(layer_idx, slot.job.priority).rows.Add(slot.rows_left[l]);
    FillDeadRows(slot.job, layer_idx);
  }
  stats_.rows += slot.rows_left_total;
  const uint32_t layers = slot.layers_open;
  ++slot.rows_left_total;  // keeps the job until all its windows were looked at
  const auto num_windows = static_cast<uint32_t>(slot.job.windows.size());
  if (num_windows < kWindowsOfChunk) {
    for (uint32_t i = 0; i < num_windows; ++i) {
      for (uint32_t order = 2; order < num_orders_ + 2; ++order) {
        StartNgram(job_idx, i, order, layers);
      }
    }
  } else {
    StartChunk(job_idx, layers);
  }
  --jobs_[job_idx].rows_left_total;
  // Layers whose rows were all in the cache, or that have only dead tokens, are done.
  for (int layer_idx = 0; layer_idx < tables_.num_layers(); ++layer_idx) {
    if (jobs_[job_idx].rows_left[static_cast<size_t>(layer_idx)] == 0) {
      FinishLayer(job_idx, layer_idx, GatherStatus::kOk, "");
    }
  }
  ReleaseJobIfDone(job_idx);
  SubmitQueued();
}

// All windows that share an n-gram are asked for together, so that their blocks are read once; then
// the drive can be served while the rest of the chunk is still to be hashed.
void GatherEngine::StartChunk(uint32_t job_idx, uint32_t layers) {
  const auto num_windows = static_cast<uint32_t>(jobs_[job_idx].job.windows.size());
  const uint32_t num_orders = num_orders_;
  // By order and window: the next window with the same n-gram; kStarted for those that were asked
  // for.
  std::vector<uint32_t> next(size_t{num_orders} * num_windows, kNone);
  absl::flat_hash_map<NgramKey, uint32_t> first;
  for (uint32_t order_idx = 0; order_idx < num_orders; ++order_idx) {
    first.clear();
    for (uint32_t i = num_windows; i > 0; --i) {
      const Window& window = jobs_[job_idx].job.windows[i - 1];
      if (!window.live) continue;
      const auto [it, inserted] = first.try_emplace(KeyOf(window, order_idx + 2), i - 1);
      if (inserted) continue;
      next[size_t{order_idx} * num_windows + i - 1] = std::exchange(it->second, i - 1);
    }
  }
  for (uint32_t i = 0; i < num_windows; ++i) {
    for (uint32_t order_idx = 0; order_idx < num_orders; ++order_idx) {
      uint32_t* chain = &next[size_t{order_idx} * num_windows];
      for (uint32_t at = i; at != kNone && chain[at] != kStarted;) {
        StartNgram(job_idx, at, order_idx + 2, layers);
        at = std::exchange(chain[at], kStarted);
      }
    }
    if (i % kWindowsPerTurn == kWindowsPerTurn - 1) Poll(/*wait=*/false);
  }
}

// One n-gram of one window: from the cache, or read, for all layers asked for.
void GatherEngine::StartNgram(uint32_t job_idx,
                              uint32_t window_idx,
                              uint32_t order,
                              uint32_t layers) {
  const Window window = jobs_[job_idx].job.windows[window_idx];
  if (!window.live) return;
  const uint32_t order_idx = order - 2;
  RowCache::Ref cached;
  const bool cache = cache_ != nullptr && !jobs_[job_idx].job.past_cache;
  if (cache) cached = ProbeCache(window, order);
  const std::vector<int>& columns = tables_.columns();
  for (int layer_idx = 0; layer_idx < tables_.num_layers(); ++layer_idx) {
    if ((layers >> layer_idx & 1) == 0) continue;
    if (cache && CopyFromCache(job_idx, window_idx, layer_idx, order_idx, cached)) continue;
    std::array<uint64_t, kMaxNgram - 1> hashes;
    tables_.hasher().OrderHashes(layer_idx, window, hashes);
    for (uint32_t head = 0; head < heads_; ++head) {
      const size_t owned = order_idx * heads_ + head;
      const int column = columns[owned];
      const uint32_t prime = tables_.hasher().layer(layer_idx).primes[static_cast<size_t>(column)];
      AddRow({job_idx, layer_idx, static_cast<uint32_t>(window_idx * columns.size() + owned),
              cached, head},
             column, static_cast<uint32_t>(hashes[order_idx] % prime));
    }
  }
}

RowCache::Ref GatherEngine::ProbeCache(const Window& window, uint32_t order) {
  const NgramKey key = KeyOf(window, order);
  const RowCache::Ref found = cache_->Find(key);
  return found.valid() ? found : cache_->Insert(key);
}

bool GatherEngine::CopyFromCache(
    uint32_t job_idx, size_t window_idx, int layer_idx, uint32_t order_idx, RowCache::Ref ref) {
  const auto layer = static_cast<uint32_t>(layer_idx);
  LayerClassMeters& meters = Meters(layer_idx, jobs_[job_idx].job.priority);
  // A later n-gram of this window may have taken the place of an earlier one.
  if (!cache_->alive(ref) || !cache_->Complete(ref, layer)) {
    cache_->CountMiss(order_idx + 2);
    meters.cache_misses[order_idx + 2].Add();
    return false;
  }
  cache_->CountHit(order_idx + 2);
  meters.cache_hits[order_idx + 2].Add();
  JobSlot& slot = jobs_[job_idx];
  const auto& destination = slot.job.destinations[layer];
  if (destination.weights != nullptr && (slot.layers_open >> layer & 1) != 0) {
    const size_t row = window_idx * tables_.columns().size() + order_idx * heads_;
    const RowCacheShape& shape = cache_->shape();
    memcpy(destination.weights + row * shape.weight_bytes, cache_->Weights(ref, layer),
           size_t{heads_} * shape.weight_bytes);
    memcpy(destination.scales + row * shape.scale_bytes, cache_->Scales(ref, layer),
           size_t{heads_} * shape.scale_bytes);
  }
  slot.waits = false;
  slot.rows_left[layer] -= heads_;
  slot.rows_left_total -= heads_;
  return true;
}

void GatherEngine::FinishLayer(uint32_t job_idx,
                               int layer_idx,
                               GatherStatus status,
                               const std::string& error) {
  JobSlot& slot = jobs_[job_idx];
  if ((slot.layers_open >> layer_idx & 1) == 0) return;
  if (status == GatherStatus::kOk) {
    // After the last read and before anyone sees a row: what was read came from the file that was
    // checked, or nothing is passed on.
    const absl::Status same = tables_.table(layer_idx).CheckUnchanged();
    if (!same.ok()) {
      FailLayer(layer_idx, std::string(same.message()));  // reports this job too
      return;
    }
  }
  slot.layers_open &= ~(1u << layer_idx);
  if (status == GatherStatus::kTimeout) {
    ++stats_.timeouts;
    Meters(layer_idx, slot.job.priority).timeouts.Add();
  }
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
  failures_[static_cast<size_t>(layer_idx)] = error;
  stats_.last_error = error;
  ++stats_.data_errors;
  for (uint32_t i = 0; i < jobs_.size(); ++i) {
    if (jobs_[i].used) FinishLayer(i, layer_idx, GatherStatus::kDataError, error);
  }
}

void GatherEngine::CheckTables() {
  for (int layer_idx = 0; layer_idx < tables_.num_layers(); ++layer_idx) {
    if (!layer_failure(layer_idx).empty()) continue;
    const absl::Status same = tables_.table(layer_idx).CheckUnchanged();
    if (!same.ok()) FailLayer(layer_idx, std::string(same.message()));
  }
  for (uint32_t i = 0; i < jobs_.size(); ++i)
    ReleaseJobIfDone(i);
}

void GatherEngine::NoteQueueAge(int64_t age_ns, int64_t now_ns) {
  if (age_ns <= kQueueAgeNsMax) return;
  if (!meters_.overloaded(now_ns)) meters_.overloads.Add();
  meters_.overloaded_until_ns.Set(static_cast<uint64_t>(now_ns + kOverloadHoldNs));
}

void GatherEngine::CheckDeadlines() {
  if (num_jobs_ == 0) return;
  const int64_t now = MonotonicNs();
  for (uint32_t i = 0; i < jobs_.size(); ++i) {
    JobSlot& slot = jobs_[i];
    if (slot.used && slot.layers_open != 0 && slot.waits && now > slot.look_ns) {
      NoteQueueAge(now - slot.started_ns, now);
      slot.look_ns = now + kOverloadHoldNs / 2;
    }
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
    if (!slot.used || slot.layers_open == 0) continue;
    if (slot.job.deadline_ns != 0) next = std::min(next, slot.job.deadline_ns);
    if (slot.waits) next = std::min(next, slot.look_ns);
  }
  return next;
}

}  // namespace twinspark::engram
