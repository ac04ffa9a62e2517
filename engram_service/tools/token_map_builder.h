// Makes a token map from a tokenizer.json (byte-level BPE with added tokens): one class per
// normalised text, numbered by first use (engram.md 1.2). The result depends on the Unicode tables
// of utf8proc, which is why the serving program reads a map instead. Callers: make_token_map,
// golden_engram.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace twinspark::engram {

// Class per token id. `json` is the text of tokenizer.json; its ids must be 0..n-1 without a gap.
absl::StatusOr<std::vector<int32_t>> BuildTokenMap(std::string_view json);

// Compatibility composition, decomposition, marks removed, lower case, blanks folded, white space
// stripped. Empty when nothing is left. `text` is valid UTF-8.
absl::StatusOr<std::string> NormalizeTokenText(std::string_view text);

}  // namespace twinspark::engram
