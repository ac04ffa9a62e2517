// Windows and buckets; unsigned 64-bit arithmetic equals the reference's signed one because
// DeriveLayerHashes refuses constants whose products pass 2^63.
#include "engram_service/store/hasher.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "common/status_macros.h"

namespace twinspark::engram {

absl::StatusOr<Hasher> Hasher::Create(const EngramShape& shape, TokenMap map) {
  Hasher hasher;
  hasher.shape_ = shape;
  ASSIGN_OR_RETURN(hasher.layers_, DeriveLayerHashes(shape));
  if (map.size() != shape.vocab_size || map.num_classes() != shape.num_classes) {
    return absl::DataLossError(absl::StrCat("token map has ", map.size(), " ids in ",
                                            map.num_classes(), " classes; config.json has ",
                                            shape.vocab_size, " in ", shape.num_classes));
  }
  if (shape.pad_token_id < 0 || shape.pad_token_id >= map.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("engram_pad_token_id ", shape.pad_token_id, " is outside the vocabulary"));
  }
  hasher.pad_class_ = map.Class(shape.pad_token_id);
  hasher.map_ = std::move(map);
  return hasher;
}

absl::Status Hasher::Windows(std::span<const int32_t> ids,
                             size_t num_history,
                             std::span<const uint8_t> dead,
                             std::span<Window> out) const {
  CHECK_EQ(ids.size(), num_history + out.size());
  CHECK(dead.empty() || dead.size() == ids.size());
  const size_t size = static_cast<size_t>(shape_.max_ngram_size);
  // Classes of the last positions, newest first; -1 = dead or before the start of the sequence.
  std::array<int32_t, kMaxNgram> recent;
  recent.fill(-1);
  for (size_t i = 0; i < ids.size(); ++i) {
    for (size_t k = size - 1; k > 0; --k)
      recent[k] = recent[k - 1];
    if (!dead.empty() && dead[i] != 0) {
      recent[0] = -1;
    } else if (ids[i] < 0 || ids[i] >= map_.size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("token id ", ids[i], " at index ", i, " is outside 0..", map_.size() - 1));
    } else {
      recent[0] = map_.Class(ids[i]);
    }
    if (i < num_history) continue;
    Window& window = out[i - num_history];
    window.live = recent[0] >= 0;
    bool blocked = false;
    for (size_t k = 0; k < size; ++k) {
      blocked = blocked || recent[k] < 0;
      window.ids[k] = blocked ? pad_class_ : recent[k];
    }
    for (size_t k = size; k < kMaxNgram; ++k)
      window.ids[k] = pad_class_;
  }
  return absl::OkStatus();
}

void Hasher::Buckets(int layer_idx,
                     const Window& window,
                     std::span<const int> columns,
                     std::span<uint32_t> buckets) const {
  const LayerHash& layer_hash = layers_[static_cast<size_t>(layer_idx)];
  std::array<uint64_t, kMaxNgram - 1> hashes;
  OrderHashes(layer_idx, window, hashes);
  for (size_t i = 0; i < columns.size(); ++i) {
    const size_t column = static_cast<size_t>(columns[i]);
    buckets[i] = static_cast<uint32_t>(hashes[column / static_cast<size_t>(shape_.num_heads)] %
                                       layer_hash.primes[column]);
  }
}

void Hasher::Rows(int layer_idx, const Window& window, std::span<uint64_t> rows) const {
  const LayerHash& layer_hash = layers_[static_cast<size_t>(layer_idx)];
  CHECK_EQ(rows.size(), layer_hash.primes.size());
  std::array<uint64_t, kMaxNgram - 1> hashes;
  OrderHashes(layer_idx, window, hashes);
  for (size_t column = 0; column < rows.size(); ++column) {
    rows[column] =
        hashes[column / static_cast<size_t>(shape_.num_heads)] % layer_hash.primes[column] +
        layer_hash.offsets[column];
  }
}

}  // namespace twinspark::engram
