// The three split rules of the DeepSeek tokenizers (V3 to V4.1; chat.md 1.2 of the specification):
// text to the pieces that byte-pair merging never crosses. Written as a scanner instead of regular
// expressions; the test compares it with PCRE2 running the patterns themselves.
#pragma once

#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"

#include "gateway/text/unicode_class.h"

namespace twinspark::gateway {

// The patterns as tokenizer.json spells them; a file with others is refused by the loader.
inline constexpr std::string_view kSplitNumbers = R"(\p{N}{1,3})";
inline constexpr std::string_view kSplitCjk = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+";
inline constexpr std::string_view kSplitWords =
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+)"
    R"(| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// Immutable; thread-safe.
class PreTokenizer {
 public:
  // Takes one piece; false = no more are wanted.
  using Taker = absl::FunctionRef<bool(std::string_view piece)>;

  // Gives the pieces of `text` in order; they cover it completely. False when `take` ended it.
  // Invalid UTF-8 does no harm: a broken byte counts as an unassigned code point.
  bool Split(std::string_view text, Taker take) const;
  void Split(std::string_view text, std::vector<std::string_view>* pieces) const {
    Split(text, [pieces](std::string_view piece) {
      pieces->push_back(piece);
      return true;
    });
  }

 private:
  // Each rule cuts a piece of the rule before it.
  bool SplitCjk(std::string_view text, Taker take) const;
  bool SplitWords(std::string_view text, Taker take) const;
  // End of the match of rule 3 that starts at `pos`, or `pos` when none does.
  size_t MatchWord(std::string_view text, size_t pos) const;
  // End of the maximal run from `pos` of code points whose class is in `mask` (1 << CharClass).
  size_t SkipRun(std::string_view text, size_t pos, unsigned mask) const;

  UnicodeClasses classes_;
};

}  // namespace twinspark::gateway
