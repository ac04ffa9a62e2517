// Text to token ids and back: the byte-level BPE of DeepSeek V3 to V4.1 as any tokenizer.json of
// their pipeline describes it (chat.md 1 of the specification). Control tokens are found by their
// spelling, never by number, so that the demo model's small vocabulary works like the released one.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"

#include "gateway/text/bpe_model.h"
#include "gateway/text/encode_budget.h"
#include "gateway/text/piece_cache.h"
#include "gateway/text/pre_tokenizer.h"

namespace twinspark::gateway {

struct AddedToken {
  int32_t id = 0;
  std::string text;
};

// Thread-safe (a cache inside is locked).
class Tokenizer {
 public:
  // Reads a tokenizer.json. INVALID_ARGUMENT names what is not of this pipeline (another model
  // type, other split patterns, a normalizer); the released vocabulary (128,000 base entries) must
  // have its 127,741 merges too. `added_override`, when not empty, replaces the file's added
  // tokens.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> FromJson(
      std::string_view json, std::span<const AddedToken> added_override = {});
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& path);

  // One past the largest id.
  int32_t vocab_size() const { return static_cast<int32_t>(token_bytes_.size()); }
  int32_t num_base_tokens() const { return num_base_tokens_; }

  // Appends the ids of `text` taken as ordinary text: a spelling like "</think>" becomes letters.
  // `text` should be valid UTF-8; nothing breaks when it is not. False when `budget` ended it
  // early, with some of the ids appended (none, where the length of the text alone says that they
  // are too many).
  bool EncodePlain(std::string_view text,
                   std::vector<int32_t>* ids,
                   const EncodeBudget& budget = {}) const;
  // The same, but spellings of added tokens become those tokens (leftmost, then longest).
  bool EncodeParse(std::string_view text,
                   std::vector<int32_t>* ids,
                   const EncodeBudget& budget = {}) const;
  // No text of `num_bytes` bytes has fewer ids than this.
  size_t FewestIds(size_t num_bytes) const { return num_bytes / max_token_bytes_; }

  // The bytes of a token; the spelling of an added one; empty for ids that do not exist.
  std::string_view TokenBytes(int32_t id) const;
  bool IsAdded(int32_t id) const;
  std::optional<int32_t> FindAdded(std::string_view spelling) const;

  // All bytes of `ids`, added tokens by their spelling; not repaired.
  std::string DecodeBytes(std::span<const int32_t> ids) const;

  const PreTokenizer& pre_tokenizer() const { return pre_tokenizer_; }

 private:
  Tokenizer(BpeModel bpe, std::vector<std::string> token_bytes, std::vector<AddedToken> added);

  // Id and length of the longest added token that starts at text[pos]; {-1, 0} when none does.
  std::pair<int32_t, size_t> MatchAdded(std::string_view text, size_t pos) const;

  BpeModel bpe_;
  PreTokenizer pre_tokenizer_;
  std::vector<std::string> token_bytes_;
  std::vector<bool> is_added_;
  int32_t num_base_tokens_ = 0;
  size_t max_token_bytes_ = 1;            // of added tokens too
  std::array<bool, 256> begins_added_{};  // first bytes of their spellings
  absl::flat_hash_map<std::string, int32_t> added_ids_;
  // Trie of the spellings: (node << 8 | byte) to node; node_ids_[node] is the token that ends
  // there.
  absl::flat_hash_map<uint64_t, uint32_t> trie_;
  std::vector<int32_t> node_ids_{-1};
  mutable PieceCache cache_;
};

}  // namespace twinspark::gateway
