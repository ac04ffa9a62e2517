// Builds the two-stage table: 4,352 blocks of 256 code points, of which about 200 differ.
#include "gateway/text/unicode_class.h"

#include <string>

#include <utf8proc.h>

#include "absl/container/flat_hash_map.h"

namespace twinspark::gateway {
namespace {

bool IsWhiteSpace(uint32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

CharClass Classify(uint32_t c) {
  if (c == '\r' || c == '\n') return CharClass::kNewline;
  if (IsWhiteSpace(c)) return CharClass::kSpace;
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
      return CharClass::kLetter;
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
      return CharClass::kMark;
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_NO:
      return CharClass::kNumber;
    case UTF8PROC_CATEGORY_PC:
    case UTF8PROC_CATEGORY_PD:
    case UTF8PROC_CATEGORY_PS:
    case UTF8PROC_CATEGORY_PE:
    case UTF8PROC_CATEGORY_PI:
    case UTF8PROC_CATEGORY_PF:
    case UTF8PROC_CATEGORY_PO:
    case UTF8PROC_CATEGORY_SM:
    case UTF8PROC_CATEGORY_SC:
    case UTF8PROC_CATEGORY_SK:
    case UTF8PROC_CATEGORY_SO:
      return CharClass::kPunctuation;
    default:
      return CharClass::kOther;
  }
}

}  // namespace

UnicodeClasses::UnicodeClasses() {
  absl::flat_hash_map<std::string, uint16_t> known;
  for (uint32_t block = 0; block < roots_.size(); ++block) {
    std::string leaf(256, '\0');
    for (uint32_t i = 0; i < 256; ++i) {
      leaf[i] = static_cast<char>(Classify(block << 8 | i));
    }
    const auto [it, is_new] = known.try_emplace(leaf, static_cast<uint16_t>(known.size()));
    if (is_new) {
      for (const char c : leaf)
        leaves_.push_back(static_cast<CharClass>(c));
    }
    roots_[block] = it->second;
  }
  for (uint32_t c = 0; c < ascii_.size(); ++c)
    ascii_[c] = Classify(c);
}

}  // namespace twinspark::gateway
