// The table of well-formed byte sequences is table 3-7 of the Unicode standard: the second byte of
// E0, ED, F0 and F4 has a narrower range than 80..BF.
#include "gateway/text/utf8.h"

namespace twinspark::gateway {
namespace {

struct LeadByte {
  size_t length;       // of the whole sequence; 0 = not a lead byte
  uint8_t second_low;  // allowed range of the second byte
  uint8_t second_high;
};

LeadByte ClassifyLead(uint8_t byte) {
  if (byte < 0x80) return {1, 0, 0};
  if (byte < 0xC2) return {0, 0, 0};
  if (byte < 0xE0) return {2, 0x80, 0xBF};
  if (byte == 0xE0) return {3, 0xA0, 0xBF};
  if (byte == 0xED) return {3, 0x80, 0x9F};
  if (byte < 0xF0) return {3, 0x80, 0xBF};
  if (byte == 0xF0) return {4, 0x90, 0xBF};
  if (byte < 0xF4) return {4, 0x80, 0xBF};
  if (byte == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

// Bytes of the sequence at `pos` that are right so far; `*complete` tells whether it is whole.
size_t MatchSequence(std::string_view bytes, size_t pos, bool* complete) {
  const LeadByte lead = ClassifyLead(static_cast<uint8_t>(bytes[pos]));
  *complete = lead.length == 1;
  if (lead.length <= 1) return lead.length;
  size_t n = 1;
  while (n < lead.length && pos + n < bytes.size()) {
    const uint8_t byte = static_cast<uint8_t>(bytes[pos + n]);
    const uint8_t low = n == 1 ? lead.second_low : 0x80;
    const uint8_t high = n == 1 ? lead.second_high : 0xBF;
    if (byte < low || byte > high) return n;
    ++n;
  }
  *complete = n == lead.length;
  return n;
}

}  // namespace

CodePoint DecodeUtf8(std::string_view bytes, size_t pos) {
  const uint8_t first = static_cast<uint8_t>(bytes[pos]);
  if (first < 0x80) return {first, 1};
  bool complete = false;
  const size_t n = MatchSequence(bytes, pos, &complete);
  if (!complete) return {CodePoint::kInvalid, n == 0 ? 1 : n};
  uint32_t value = first & (0xFFu >> (n + 1));
  for (size_t i = 1; i < n; ++i) {
    value = value << 6 | (static_cast<uint8_t>(bytes[pos + i]) & 0x3Fu);
  }
  return {value, n};
}

bool IsValidUtf8(std::string_view bytes) {
  size_t pos = 0;
  while (pos < bytes.size()) {
    if (static_cast<uint8_t>(bytes[pos]) < 0x80) {
      ++pos;
      continue;
    }
    bool complete = false;
    const size_t n = MatchSequence(bytes, pos, &complete);
    if (!complete) return false;
    pos += n;
  }
  return true;
}

size_t IncompleteUtf8Tail(std::string_view bytes) {
  for (size_t back = 1; back <= 3 && back <= bytes.size(); ++back) {
    const size_t pos = bytes.size() - back;
    const uint8_t byte = static_cast<uint8_t>(bytes[pos]);
    if ((byte & 0xC0) == 0x80) continue;  // continuation byte: its lead is further left
    bool complete = false;
    const size_t n = MatchSequence(bytes, pos, &complete);
    return !complete && n == back ? back : 0;
  }
  return 0;
}

void AppendUtf8(uint32_t code_point, std::string* out) {
  const auto byte = [out](uint32_t value) { out->push_back(static_cast<char>(value)); };
  if (code_point < 0x80) {
    byte(code_point);
  } else if (code_point < 0x800) {
    byte(0xC0 | code_point >> 6);
    byte(0x80 | (code_point & 0x3F));
  } else if (code_point < 0x10000) {
    byte(0xE0 | code_point >> 12);
    byte(0x80 | (code_point >> 6 & 0x3F));
    byte(0x80 | (code_point & 0x3F));
  } else {
    byte(0xF0 | code_point >> 18);
    byte(0x80 | (code_point >> 12 & 0x3F));
    byte(0x80 | (code_point >> 6 & 0x3F));
    byte(0x80 | (code_point & 0x3F));
  }
}

void AppendUtf8Repaired(std::string_view bytes, std::string* out) {
  size_t pos = 0;
  while (pos < bytes.size()) {
    const CodePoint cp = DecodeUtf8(bytes, pos);
    if (cp.value == CodePoint::kInvalid) {
      out->append(kReplacementCharacter);
    } else {
      out->append(bytes.substr(pos, cp.length));
    }
    pos += cp.length;
  }
}

}  // namespace twinspark::gateway
