// From token ids to table rows: compressed ids, windows with the dead-token latch, and one bucket
// per (order, head) column (engram.md 1.3, 1.6). The only state of a sequence is the ids before a
// request's first token, which every request carries; nothing is stored here.
// Immutable, so thread-safe. Callers: gather engine, packer's checks, golden_engram.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engram_service/store/hash_params.h"
#include "engram_service/store/token_map.h"

namespace twinspark::engram {

// Compressed ids of a position and the ones before it, newest first; pad behind the sequence start
// and behind a dead token.
struct Window {
  std::array<int32_t, kMaxNgram> ids{};
  bool live = true;  // a dead position's own window is all pad and its rows are never used
};

class Hasher {
 public:
  // Derives the constants; refuses a map that does not fit the shape.
  static absl::StatusOr<Hasher> Create(const EngramShape& shape, TokenMap map);

  const EngramShape& shape() const { return shape_; }
  const TokenMap& token_map() const { return map_; }
  std::span<const LayerHash> layers() const { return layers_; }
  const LayerHash& layer(int layer_idx) const { return layers_[static_cast<size_t>(layer_idx)]; }
  int32_t pad_class() const { return pad_class_; }

  // Windows of ids[num_history..]. `ids` starts with the history, oldest first, which must be
  // everything before the first token or at least max_ngram_size - 1 ids. `dead` is empty or has
  // one byte per id, non-zero = dead. Refuses ids outside the vocabulary (dead ones are not looked
  // up).
  absl::Status Windows(std::span<const int32_t> ids,
                       size_t num_history,
                       std::span<const uint8_t> dead,
                       std::span<Window> out) const;

  // Running XOR per order; hash(order) mod prime gives a column's bucket.
  void OrderHashes(int layer_idx,
                   const Window& window,
                   std::array<uint64_t, kMaxNgram - 1>& hashes) const {
    const LayerHash& layer_hash = layers_[static_cast<size_t>(layer_idx)];
    uint64_t running = static_cast<uint64_t>(window.ids[0]) * layer_hash.multipliers[0];
    for (int k = 1; k < shape_.max_ngram_size; ++k) {
      const size_t i = static_cast<size_t>(k);
      running ^= static_cast<uint64_t>(window.ids[i]) * layer_hash.multipliers[i];
      hashes[i - 1] = running;
    }
  }

  // Buckets of the given columns, in their order.
  void Buckets(int layer_idx,
               const Window& window,
               std::span<const int> columns,
               std::span<uint32_t> buckets) const;

  // Row numbers of all columns: bucket + offset.
  void Rows(int layer_idx, const Window& window, std::span<uint64_t> rows) const;

 private:
  Hasher() = default;

  EngramShape shape_;
  TokenMap map_;
  std::vector<LayerHash> layers_;
  int32_t pad_class_ = 0;
};

}  // namespace twinspark::engram
