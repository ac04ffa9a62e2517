// Sizes and memory of the caches (kv_cache.h).
#include "shard_worker/model/kv_cache.h"

namespace twinspark {

KvCache::KvCache(const ModelConfig& c, const ModelOptions& options, bool has_drafts) {
  const bool is_exact = options.numerics == Numerics::kF32;
  window_format_ = is_exact ? CacheFormat::kF32 : CacheFormat::kQ8;
  key_format_ = is_exact ? CacheFormat::kF32 : CacheFormat::kQ4E8;
  row_format_ = is_exact ? CacheFormat::kF32 : CacheFormat::kQ4E4;
  ring_slots_ = c.sliding_window + limits::kWindowSlack;

  const int64_t slots = options.limits.num_slots;
  for (int layer = 0; layer < c.num_layers; ++layer)
    window_.push_back(Allocate(window_format_, slots * ring_slots_, c.head_dim, ring_bytes_));
  for (int stage = 0; has_drafts && stage < c.num_draft_stages; ++stage)
    draft_.push_back(Allocate(window_format_, slots * ring_slots_, c.head_dim, ring_bytes_));
  for (int source : c.kv_source_layer_ids) {
    const int ratio = c.layers[Idx(source)].ratio;
    const int64_t num_rows = static_cast<int64_t>(options.limits.num_pages) * RowsPerPage(ratio);
    rows_.push_back(Allocate(row_format_, num_rows, c.head_dim, page_bytes_));
    keys_.push_back(Allocate(key_format_, num_rows, c.index_head_dim, page_bytes_));
    const int64_t carry_rows = ratio > 1 ? slots * kCarrySlots : 0;
    carry_.push_back(
        Allocate(CacheFormat::kF32, carry_rows, 2 * static_cast<int64_t>(c.head_dim), ring_bytes_));
  }
}

CacheRows KvCache::Allocate(CacheFormat format, int64_t num_rows, int64_t cols, int64_t& bytes) {
  const int64_t size = num_rows * CacheRowBytes(format, cols);
  memory_.emplace_back(static_cast<size_t>(size));
  bytes += size;
  return {memory_.back().data(), format, num_rows, cols};
}

}  // namespace twinspark
