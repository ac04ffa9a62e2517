// Rows of recently used n-grams: one entry holds the owned heads' rows of one n-gram for all
// layers, so one probe replaces a read per head and layer. Replacement is S3-FIFO (a small queue
// that most entries leave again, a main queue with a two-bit count, a ghost list of what left the
// small one), which hits more often than LRU on this traffic and moves nothing on a hit. All memory
// is one arena made at start; it may be populated by a thread of its own, and entries are handed
// out as far as it has come. One owner thread. Spec: engram.md 4.4.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <thread>
#include <utility>

#include "absl/status/statusor.h"

#include "engram_service/store/hash_params.h"

namespace twinspark::engram {

struct NgramKey {
  uint32_t order = 0;  // 2..kMaxNgram; ids beyond it are zero
  std::array<int32_t, kMaxNgram> ids{};

  bool operator==(const NgramKey&) const = default;
  template <typename H>
  friend H AbslHashValue(H hash, const NgramKey& key) {
    return H::combine(std::move(hash), key.order, key.ids);
  }
};

struct RowCacheShape {
  uint32_t heads = 0;   // owned heads per order
  uint32_t layers = 0;  // heads * layers <= 32
  uint32_t weight_bytes = 0;
  uint32_t scale_bytes = 0;

  uint32_t layer_bytes() const { return heads * (weight_bytes + scale_bytes); }
  uint32_t entry_bytes() const { return layers * layer_bytes(); }
};

struct RowCacheStats {
  uint64_t hits[kMaxNgram + 1] = {};  // n-grams by order, per layer asked for
  uint64_t misses[kMaxNgram + 1] = {};
  uint64_t inserted = 0;
  uint64_t evicted = 0;
};

class RowCache {
 public:
  // Populating gigabytes takes seconds on a busy machine: with kBehind it is done by a thread that
  // PopulateBehind starts, once whatever must not wait for it is done.
  enum class Populate { kNow, kBehind };

  // Names an entry for as long as it has not been replaced.
  struct Ref {
    uint32_t slot = UINT32_MAX;
    uint32_t generation = 0;
    bool valid() const { return slot != UINT32_MAX; }
  };

  // `bytes` for everything: rows, keys, queues, tables. kResourceExhausted when they cannot be had
  // (behind: when the machine has less available now); kInvalidArgument when they hold no entry.
  static absl::StatusOr<std::unique_ptr<RowCache>> Create(const RowCacheShape& shape,
                                                          size_t bytes,
                                                          Populate populate = Populate::kNow);
  // After Create with kBehind, once.
  void PopulateBehind();
  ~RowCache();
  RowCache(const RowCache&) = delete;
  RowCache& operator=(const RowCache&) = delete;

  uint32_t capacity() const { return capacity_; }
  // Entries whose memory is there; capacity() once everything is populated. Any thread.
  uint32_t usable() const { return usable_.load(std::memory_order_acquire); }
  // errno of a population that ended early: the cache stays at usable(). Any thread.
  int populate_error() const { return populate_error_.load(std::memory_order_acquire); }
  uint32_t size() const { return size_; }
  size_t arena_bytes() const { return arena_bytes_; }
  const RowCacheShape& shape() const { return shape_; }
  const RowCacheStats& stats() const { return stats_; }

  // The entry of the key, counted as used; an invalid Ref when there is none.
  Ref Find(const NgramKey& key);
  // A new entry without rows; replaces another where the cache is full. The key must not be in. An
  // invalid Ref while there is no memory for one yet.
  Ref Insert(const NgramKey& key);

  bool alive(Ref ref) const { return ref.valid() && meta_[ref.slot].generation == ref.generation; }
  // All heads of the layer are there.
  bool Complete(Ref ref, uint32_t layer) const {
    return (meta_[ref.slot].filled & LayerMask(layer)) == LayerMask(layer);
  }
  // Weights [head][weight_bytes] and scales [head][scale_bytes] of a layer.
  uint8_t* Weights(Ref ref, uint32_t layer) const {
    return Entry(ref.slot) + size_t{layer} * shape_.layer_bytes();
  }
  uint8_t* Scales(Ref ref, uint32_t layer) const {
    return Weights(ref, layer) + size_t{shape_.heads} * shape_.weight_bytes;
  }
  // The head's row is whole and valid.
  void MarkFilled(Ref ref, uint32_t layer, uint32_t head) {
    meta_[ref.slot].filled |= 1u << (layer * shape_.heads + head);
  }
  void CountHit(uint32_t order) { ++stats_.hits[order]; }
  void CountMiss(uint32_t order) { ++stats_.misses[order]; }

 private:
  struct Meta {
    NgramKey key;
    uint32_t hash = 0;
    uint32_t generation = 0;
    uint32_t filled = 0;
    uint8_t count = 0;  // uses since it was last looked at, at most 3
  };
  // A queue of slots in a ring of `capacity` places.
  struct Ring {
    uint32_t* slots = nullptr;
    uint32_t capacity = 0;
    uint32_t head = 0;
    uint32_t size = 0;
    void Push(uint32_t slot);
    uint32_t Pop();
  };

  RowCache() = default;
  absl::Status StartPopulating(Populate populate);
  void PopulateAll();
  bool HasFreeSlot() const { return free_.size > 0 || next_fresh_ < usable(); }
  uint32_t LayerMask(uint32_t layer) const {
    return ((shape_.heads == 32 ? 0 : 1u << shape_.heads) - 1) << (layer * shape_.heads);
  }
  uint8_t* Entry(uint32_t slot) const { return rows_ + size_t{slot} * shape_.entry_bytes(); }
  uint32_t FindSlot(const NgramKey& key, uint32_t hash) const;
  void AddToTable(uint32_t slot);
  void RemoveFromTable(uint32_t slot);
  void Evict();
  void Drop(uint32_t slot);
  bool InGhost(uint64_t hash) const;
  void AddGhost(uint64_t hash);

  RowCacheShape shape_;
  size_t arena_bytes_ = 0;
  void* arena_ = nullptr;
  uint32_t capacity_ = 0;
  uint32_t small_capacity_ = 0;
  uint32_t size_ = 0;
  uint8_t* rows_ = nullptr;
  Meta* meta_ = nullptr;
  uint32_t* table_ = nullptr;  // open addressing, slot + 1; 0 = free
  uint32_t table_mask_ = 0;
  Ring small_;
  Ring main_;
  Ring free_;                // given back
  uint32_t next_fresh_ = 0;  // slots from here on have never been used
  size_t rows_bytes_ = 0;    // front part of the arena
  std::atomic<uint32_t> usable_{0};
  std::atomic<bool> populating_{true};
  std::atomic<int> populate_error_{0};
  std::atomic<bool> stop_{false};
  std::thread populate_thread_;
  // Direct-mapped: fingerprint and when it came in; an entry is good for `main` insertions.
  uint64_t* ghost_ = nullptr;
  uint32_t ghost_mask_ = 0;
  uint32_t ghost_clock_ = 0;
  RowCacheStats stats_;
};

}  // namespace twinspark::engram
