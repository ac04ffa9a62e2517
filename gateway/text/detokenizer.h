// Token ids to text while they arrive (chat.md 1.6 of the specification): never half a character,
// never a byte lost. One per choice of a response; created by gateway/openai.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "gateway/text/tokenizer.h"

namespace twinspark::gateway {

// Thread-compatible. Keeps at most 3 pending bytes.
class Detokenizer {
 public:
  explicit Detokenizer(const Tokenizer& tokenizer) : tokenizer_(tokenizer) {}

  // Appends to `out` what can be emitted after an ordinary token. Ids that do not exist add
  // nothing.
  void Push(int32_t id, std::string* out);
  // Before a control token, at a stop and at the end: pending bytes become one U+FFFD.
  void Flush(std::string* out);

  size_t num_pending() const { return pending_.size(); }

 private:
  const Tokenizer& tokenizer_;
  std::string pending_;
};

}  // namespace twinspark::gateway
