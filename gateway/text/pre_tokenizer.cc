// One pass per rule. Look-ahead and \s+ see the end of their own piece, not the end of the text,
// because rule 3 runs on the pieces that rules 1 and 2 have cut.
#include "gateway/text/pre_tokenizer.h"

#include "gateway/text/utf8.h"

namespace twinspark::gateway {
namespace {

constexpr unsigned Bit(CharClass c) {
  return 1u << static_cast<unsigned>(c);
}
constexpr unsigned kLetterMark = Bit(CharClass::kLetter) | Bit(CharClass::kMark);
constexpr unsigned kWhite = Bit(CharClass::kSpace) | Bit(CharClass::kNewline);
// What alternative 2 of rule 3 may skip once: anything but CR, LF, L, P, S.
constexpr unsigned kSkippable = Bit(CharClass::kOther) | Bit(CharClass::kMark) |
                                Bit(CharClass::kNumber) | Bit(CharClass::kSpace);

bool IsAsciiLetter(char c) {
  return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}
bool IsAsciiPunctuation(char c) {
  return (c >= 0x21 && c <= 0x2F) || (c >= 0x3A && c <= 0x40) || (c >= 0x5B && c <= 0x60) ||
         (c >= 0x7B && c <= 0x7E);
}
bool IsCjk(uint32_t c) {
  return (c >= 0x4E00 && c <= 0x9FA5) || (c >= 0x3040 && c <= 0x30FF);
}

}  // namespace

bool PreTokenizer::Split(std::string_view text, Taker take) const {
  size_t start = 0;  // of the text since the last number
  size_t pos = 0;
  while (pos < text.size()) {
    const CodePoint cp = DecodeUtf8(text, pos);
    if (classes_.Of(cp.value) != CharClass::kNumber) {
      pos += cp.length;
      continue;
    }
    if (pos > start && !SplitCjk(text.substr(start, pos - start), take)) return false;
    size_t end = pos + cp.length;
    for (int n = 1; n < 3 && end < text.size(); ++n) {
      const CodePoint next = DecodeUtf8(text, end);
      if (classes_.Of(next.value) != CharClass::kNumber) break;
      end += next.length;
    }
    // Neither rule 2 nor rule 3 cuts digits.
    if (!take(text.substr(pos, end - pos))) return false;
    start = pos = end;
  }
  return pos == start || SplitCjk(text.substr(start), take);
}

bool PreTokenizer::SplitCjk(std::string_view text, Taker take) const {
  size_t start = 0;
  size_t pos = 0;
  bool in_run = false;
  while (pos < text.size()) {
    const CodePoint cp = DecodeUtf8(text, pos);
    if (IsCjk(cp.value) != in_run) {
      if (pos > start && !SplitWords(text.substr(start, pos - start), take)) return false;
      start = pos;
      in_run = !in_run;
    }
    pos += cp.length;
  }
  return pos == start || SplitWords(text.substr(start), take);
}

bool PreTokenizer::SplitWords(std::string_view text, Taker take) const {
  size_t start = 0;  // of a stretch where nothing matched
  size_t pos = 0;
  while (pos < text.size()) {
    const size_t end = MatchWord(text, pos);
    if (end == pos) {
      pos += DecodeUtf8(text, pos).length;
      continue;
    }
    if (pos > start && !take(text.substr(start, pos - start))) return false;
    if (!take(text.substr(pos, end - pos))) return false;
    start = pos = end;
  }
  return pos == start || take(text.substr(start));
}

size_t PreTokenizer::SkipRun(std::string_view text, size_t pos, unsigned mask) const {
  while (pos < text.size()) {
    const CodePoint cp = DecodeUtf8(text, pos);
    if ((mask & Bit(classes_.Of(cp.value))) == 0) break;
    pos += cp.length;
  }
  return pos;
}

size_t PreTokenizer::MatchWord(std::string_view text, size_t pos) const {
  // 1: ASCII punctuation glued to ASCII letters.
  if (IsAsciiPunctuation(text[pos]) && pos + 1 < text.size() && IsAsciiLetter(text[pos + 1])) {
    size_t end = pos + 2;
    while (end < text.size() && IsAsciiLetter(text[end]))
      ++end;
    return end;
  }
  const CodePoint first = DecodeUtf8(text, pos);
  const CharClass first_class = classes_.Of(first.value);
  // 2: letters and marks, with one skippable code point in front of them.
  if ((Bit(first_class) & kLetterMark) != 0) return SkipRun(text, pos, kLetterMark);
  if ((Bit(first_class) & kSkippable) != 0) {
    const size_t begin = pos + first.length;
    const size_t end = SkipRun(text, begin, kLetterMark);
    if (end > begin) return end;
  }
  // 3: punctuation and symbols, one space in front, line ends behind.
  const size_t begin = text[pos] == ' ' ? pos + 1 : pos;
  const size_t punctuation_end = SkipRun(text, begin, Bit(CharClass::kPunctuation));
  if (punctuation_end > begin) {
    return SkipRun(text, punctuation_end, Bit(CharClass::kNewline));
  }
  if ((Bit(first_class) & kWhite) == 0) return pos;
  // 4: white space up to and including its last line end.
  const size_t run_end = SkipRun(text, pos, kWhite);
  const size_t last_newline = text.substr(pos, run_end - pos).find_last_of("\r\n");
  if (last_newline != std::string_view::npos) return pos + last_newline + 1;
  // 5 and 6: white space; before a word it leaves its last code point to that word.
  if (run_end == text.size()) return run_end;
  size_t last = pos;
  for (size_t next = pos; next < run_end; next += DecodeUtf8(text, next).length)
    last = next;
  return last > pos ? last : run_end;
}

}  // namespace twinspark::gateway
