// Reads the parts of a tokenizer.json that matter and refuses what this tokenizer does not do.
// Split from tokenizer.cc because it knows the file format and nothing about encoding.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

#include "gateway/text/tokenizer.h"

namespace twinspark::gateway {

struct TokenizerFile {
  std::vector<std::string> token_bytes;  // by id; empty where there is no base token
  std::vector<std::pair<std::string, std::string>> merges;
  std::vector<AddedToken> added;
};

// Turns the byte-level spelling of a token ("Ġthe") into its bytes (" the").
absl::StatusOr<std::string> BytesOfByteLevel(std::string_view spelling);

absl::StatusOr<TokenizerFile> ParseTokenizerJson(std::string_view json);

}  // namespace twinspark::gateway
