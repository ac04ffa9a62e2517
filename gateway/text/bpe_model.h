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

#include "gateway/text/encode_budget.h"

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

  // Appends the ids of `piece`; false when `budget` ended it early, with part of them appended.
  // Time grows with the length of the piece and no faster, memory does not (but for the ids): one
  // long piece is no denial of service.
  bool Encode(std::string_view piece,
              std::vector<int32_t>* ids,
              const EncodeBudget& budget = {}) const;

  // The three ways in which Encode does it; they agree. Short pieces, at most kMaxShortBytes, are
  // merged in an array, which is several times faster than the heap of longer ones. What is longer
  // than `window_bytes` is merged window by window.
  static constexpr size_t kMaxShortBytes = 48;
  static constexpr size_t kWindowBytes = 4096;
  void EncodeShort(std::string_view piece, std::vector<int32_t>* ids) const;
  void EncodeWhole(std::string_view piece, std::vector<int32_t>* ids) const;
  bool EncodeLong(std::string_view piece,
                  std::vector<int32_t>* ids,
                  const EncodeBudget& budget = {},
                  size_t window_bytes = kWindowBytes) const;

  // Bytes of the longest token: a text of n bytes has at least n / max_token_bytes() ids.
  size_t max_token_bytes() const { return max_token_bytes_; }

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

  size_t NumBytes(int32_t id) const { return num_bytes_[static_cast<size_t>(id)]; }
  // Whether `right` may stand behind `left`: merging their joined bytes gives the two again.
  bool StandTogether(int32_t left, int32_t right, std::string_view joined) const;

  std::array<int32_t, 256> byte_ids_{};
  std::vector<uint32_t> num_bytes_;  // by token id
  size_t max_token_bytes_ = 1;
  absl::flat_hash_map<uint64_t, Merge> merges_;
  std::vector<Merge> byte_merges_;  // of two single bytes: left << 8 | right
};

}  // namespace twinspark::gateway
