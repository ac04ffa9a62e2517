// A bounded memory of short pieces and their ids: ordinary text repeats its words, and a look-up is
// several times cheaper than merging. Direct-mapped, so that it never needs eviction lists.
#pragma once

#include <array>
#include <cstdint>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/hash/hash.h"

#include "common/string_view.h"

namespace twinspark::gateway {

// Thread-safe: sixteen shards with a lock each.
class PieceCache {
 public:
  static constexpr size_t kMaxPieceBytes = 64;
  static constexpr size_t kSlotsPerShard = 2048;  // 32,768 pieces in all, about 4 MB when full

  PieceCache() {
    for (Shard& shard : shards_)
      shard.slots.resize(kSlotsPerShard);
  }

  // Appends the ids of `piece` when it is known.
  bool Lookup(std::string_view piece, std::vector<int32_t>* ids) {
    const size_t hash = absl::HashOf(ToAbsl(piece));
    Shard& shard = shards_[hash % kNumShards];
    const std::lock_guard<std::mutex> lock(shard.mutex);
    const Slot& slot = shard.slots[hash / kNumShards % kSlotsPerShard];
    if (slot.piece != piece) return false;
    ids->insert(ids->end(), slot.ids.begin(), slot.ids.end());
    return true;
  }

  void Store(std::string_view piece, const int32_t* begin, const int32_t* end) {
    const size_t hash = absl::HashOf(ToAbsl(piece));
    Shard& shard = shards_[hash % kNumShards];
    const std::lock_guard<std::mutex> lock(shard.mutex);
    Slot& slot = shard.slots[hash / kNumShards % kSlotsPerShard];
    slot.piece.assign(piece);
    slot.ids.assign(begin, end);
  }

 private:
  static constexpr size_t kNumShards = 16;
  struct Slot {
    std::string piece;  // empty: unused (no piece is empty)
    std::vector<int32_t> ids;
  };
  struct Shard {
    std::mutex mutex;
    std::vector<Slot> slots;
  };
  std::array<Shard, kNumShards> shards_;
};

}  // namespace twinspark::gateway
