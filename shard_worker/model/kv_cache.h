// The memory of all sequences: window rings, draft rings, compressor carries and pages of
// compressed rows and index keys. Everything is addressed by (slot, absolute position) or by
// physical page, so that lowering a length is the only undo there is (model specification 4, dspark
// specification 2.5). Allocated once; contents are written by the forward pass only. Not
// thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/limits.h"
#include "common/model_config.h"
#include "kernels/quant/cache_format.h"
#include "shard_worker/model/model.h"

namespace twinspark {

class KvCache {
 public:
  KvCache(const ModelConfig& config, const ModelOptions& options, bool has_drafts);

  // Formats of the three quantisers; plain f32 with the f32 numerics.
  CacheFormat window_format() const { return window_format_; }
  CacheFormat key_format() const { return key_format_; }
  CacheFormat row_format() const { return row_format_; }

  int64_t ring_slots() const { return ring_slots_; }
  static constexpr int64_t kCarrySlots =
      16;  // raw rows kept per slot; a power of two >= drafts + 2
  static_assert(kCarrySlots >= 2 * limits::kMaxRowsPerSequence);

  const CacheRows& window_ring(int layer) const { return window_[Idx(layer)]; }
  const CacheRows& draft_ring(int stage) const { return draft_[Idx(stage)]; }
  // By index into kv_source_layer_ids.
  const CacheRows& rows(int source_idx) const { return rows_[Idx(source_idx)]; }
  const CacheRows& keys(int source_idx) const { return keys_[Idx(source_idx)]; }
  const CacheRows& carry(int source_idx) const { return carry_[Idx(source_idx)]; }

  int64_t RingRow(int slot, int64_t position) const {
    return slot * ring_slots_ + position % ring_slots_;
  }
  static int64_t CarryRow(int slot, int64_t position) {
    return slot * kCarrySlots + position % kCarrySlots;
  }
  static int RowsPerPage(int ratio) { return limits::kPageTokens / ratio; }

  int64_t ring_bytes() const { return ring_bytes_; }
  int64_t page_bytes() const { return page_bytes_; }

 private:
  static size_t Idx(int i) { return static_cast<size_t>(i); }
  CacheRows Allocate(CacheFormat format, int64_t num_rows, int64_t cols, int64_t& bytes);

  CacheFormat window_format_;
  CacheFormat key_format_;
  CacheFormat row_format_;
  int64_t ring_slots_;
  int64_t ring_bytes_ = 0;
  int64_t page_bytes_ = 0;
  std::vector<std::vector<std::byte>> memory_;
  std::vector<CacheRows> window_, draft_, rows_, keys_, carry_;
};

}  // namespace twinspark
