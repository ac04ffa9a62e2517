// UTF-8 at its lowest level: validation of whole strings, decoding of one code point, and the
// length of what can still become valid. Used by everything in this folder; no tables, no state.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace twinspark::gateway {

// The code point at bytes[pos] and its length in bytes. An ill-formed byte gives {kInvalid, length
// of the maximal invalid subpart (1..3)}, as the WHATWG decoder counts them.
struct CodePoint {
  static constexpr uint32_t kInvalid = 0xFFFFFFFFu;
  uint32_t value = kInvalid;
  size_t length = 1;
};
CodePoint DecodeUtf8(std::string_view bytes, size_t pos);

// True for well-formed UTF-8 (no surrogates, no overlong forms, at most U+10FFFF).
bool IsValidUtf8(std::string_view bytes);

// Number of bytes (0..3) at the end of `bytes` that are the start of a code point and need more
// bytes; everything before them can be decoded for good.
size_t IncompleteUtf8Tail(std::string_view bytes);

void AppendUtf8(uint32_t code_point, std::string* out);

// Appends `bytes`, with one U+FFFD for each maximal invalid subpart.
void AppendUtf8Repaired(std::string_view bytes, std::string* out);

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";  // U+FFFD

}  // namespace twinspark::gateway
