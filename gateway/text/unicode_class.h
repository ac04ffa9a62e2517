// The classes of code points that the split rules ask for (general categories L, M, N, P, S and
// White_Space), from utf8proc's tables (Unicode 15). A two-stage table, built once per Tokenizer.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace twinspark::gateway {

enum class CharClass : uint8_t {
  kOther,
  kLetter,
  kMark,
  kNumber,
  kPunctuation,  // categories P and S
  kNewline,      // CR and LF; they are white space too
  kSpace,        // White_Space other than CR and LF
};

// Immutable after construction; thread-safe.
class UnicodeClasses {
 public:
  UnicodeClasses();

  // Code points past U+10FFFF (CodePoint::kInvalid among them) are kOther.
  CharClass Of(uint32_t code_point) const {
    if (code_point < 0x80) return ascii_[code_point];
    if (code_point > 0x10FFFF) return CharClass::kOther;
    return leaves_[static_cast<size_t>(roots_[code_point >> 8]) * 256 + (code_point & 0xFF)];
  }

 private:
  std::array<CharClass, 0x80> ascii_;
  std::array<uint16_t, 0x1100> roots_;  // index of a leaf of 256 classes; equal leaves are shared
  std::vector<CharClass> leaves_;
};

}  // namespace twinspark::gateway
