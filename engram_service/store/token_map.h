// Token id to compressed id (class of a token after text normalisation, engram.md 1.2). The map is
// read, never computed here, because it depends on the Unicode tables of the library that makes it:
// tools/make_token_map does that. Immutable, thread-safe.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "engram_service/store/sha256.h"

namespace twinspark::engram {

class TokenMap {
 public:
  TokenMap() = default;

  // Classes must be 0..n-1, each used: a gap means a cut or damaged map.
  static absl::StatusOr<TokenMap> FromClasses(std::vector<int32_t> classes);
  // Little-endian int32 per token id.
  static absl::StatusOr<TokenMap> FromBytes(std::span<const uint8_t> bytes);

  int32_t Class(int32_t token_id) const { return classes_[static_cast<size_t>(token_id)]; }
  int32_t size() const { return static_cast<int32_t>(classes_.size()); }
  uint64_t num_classes() const { return num_classes_; }
  std::span<const int32_t> classes() const { return classes_; }
  // SHA-256 of the map as little-endian int32.
  const Sha256Digest& digest() const { return digest_; }

 private:
  std::vector<int32_t> classes_;
  uint64_t num_classes_ = 0;
  Sha256Digest digest_{};
};

// The map of the released model, part of this program (data/token_map_released_i32.bin).
std::span<const uint8_t> ReleasedTokenMapBytes();

// SHA-256 of the released tokenizer.json, whose map ReleasedTokenMapBytes is.
inline constexpr char kReleasedTokenizerSha256[] =
    "c90dfa01249db1be4245780a052ede752e1361c612ac6d08e2bdada7d599476b";

// token_map_i32.bin of the directory; else the released map if tokenizer.json there is the released
// one; else NOT_FOUND naming make_token_map.
absl::StatusOr<TokenMap> LoadTokenMap(const std::string& model_dir);

}  // namespace twinspark::engram
