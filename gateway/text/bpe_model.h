// Byte-pair merging of one piece: bytes to token ids (chat.md 1.1 of the specification). Owns the
// merge table and nothing else; called by Tokenizer for pieces that its cache does not know.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"

namespace twinspark::gateway {

// Immutable after Create; thread-safe.
class BpeModel {
 public:
  // token_bytes[id] is the byte string of base token `id` (empty: no such token). merges are pairs
  // of byte strings, most important first. INVALID_ARGUMENT when a merge names an unknown token or
  // a single byte has none.
  static absl::StatusOr<BpeModel> Create(
      std::span<const std::string> token_bytes,
      std::span<const std::pair<std::string, std::string>> merges);

  // Appends the ids of `piece`. O(n log n) for any input: one long piece is no denial of service.
  void Encode(std::string_view piece, std::vector<int32_t>* ids) const;

  // The two ways in which Encode does it; they agree. Short pieces, at most kMaxShortBytes, are
  // merged in an array, which is several times faster than the heap that long ones need.
  static constexpr size_t kMaxShortBytes = 48;
  void EncodeShort(std::string_view piece, std::vector<int32_t>* ids) const;
  void EncodeLong(std::string_view piece, std::vector<int32_t>* ids) const;

 private:
  static constexpr int32_t kNoRank = INT32_MAX;
  struct Merge {
    int32_t rank = kNoRank;
    int32_t id = -1;  // of the merged token
  };
  // The merge of two neighbours; rank kNoRank when there is none.
  Merge Find(int32_t left, int32_t right) const {
    const auto it = merges_.find(Key(left, right));
    return it == merges_.end() ? Merge() : it->second;
  }
  static uint64_t Key(int32_t left, int32_t right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }

  std::array<int32_t, 256> byte_ids_{};
  absl::flat_hash_map<uint64_t, Merge> merges_;
  std::vector<Merge> byte_merges_;  // of two single bytes: left << 8 | right
};

}  // namespace twinspark::gateway
