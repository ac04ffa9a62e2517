// Goal: the scanner cuts as the three patterns do. Method: PCRE2 runs the patterns themselves, in
// sequence, over random strings from an alphabet that is rich in borderline characters; code points
// whose class differs between Unicode 14 (PCRE2) and 15 (utf8proc) are left out.
#include "gateway/text/pre_tokenizer.h"

#include <cstdint>
#include <random>
#include <string>

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "gateway/text/utf8.h"

namespace twinspark::gateway {
namespace {

using ::testing::ElementsAre;

// One pattern, applied as an isolating split.
class RegexSplit {
 public:
  explicit RegexSplit(std::string_view pattern) {
    int error = 0;
    PCRE2_SIZE offset = 0;
    code_ = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                          PCRE2_UTF | PCRE2_UCP, &error, &offset, nullptr);
    EXPECT_NE(code_, nullptr) << error << " at " << offset;
    match_ = pcre2_match_data_create_from_pattern(code_, nullptr);
  }
  ~RegexSplit() {
    pcre2_match_data_free(match_);
    pcre2_code_free(code_);
  }
  RegexSplit(const RegexSplit&) = delete;
  RegexSplit& operator=(const RegexSplit&) = delete;

  std::vector<std::string_view> Apply(const std::vector<std::string_view>& pieces) const {
    std::vector<std::string_view> out;
    for (const std::string_view piece : pieces) {
      size_t start = 0;
      while (start < piece.size() && pcre2_match(code_, reinterpret_cast<PCRE2_SPTR>(piece.data()),
                                                 piece.size(), start, 0, match_, nullptr) > 0) {
        const PCRE2_SIZE* range = pcre2_get_ovector_pointer(match_);
        if (range[0] > start) out.push_back(piece.substr(start, range[0] - start));
        out.push_back(piece.substr(range[0], range[1] - range[0]));
        start = range[1];
      }
      if (start < piece.size()) out.push_back(piece.substr(start));
    }
    return out;
  }

 private:
  pcre2_code* code_;
  pcre2_match_data* match_;
};

// Category of PCRE2 for one code point, as a letter of "LMNPS" or '-'.
char RegexClass(uint32_t c, const std::vector<std::pair<char, const RegexSplit*>>& classes) {
  std::string text;
  AppendUtf8(c, &text);
  for (const auto& [name, regex] : classes) {
    const std::string padded = "\x01" + text;
    if (regex->Apply({padded}).size() == 2) return name;
  }
  return '-';
}

TEST(PreTokenizer, AgreesWithTheRegularExpressions) {
  const RegexSplit numbers(kSplitNumbers);
  const RegexSplit cjk(kSplitCjk);
  const RegexSplit words(kSplitWords);
  const RegexSplit letter(R"([\p{L}])"), mark(R"([\p{M}])"), number(R"([\p{N}])"),
      punctuation(R"([\p{P}\p{S}])"), space(R"(\s)");
  const std::vector<std::pair<char, const RegexSplit*>> classes = {
      {'L', &letter}, {'M', &mark}, {'N', &number}, {'P', &punctuation}, {'W', &space}};
  const UnicodeClasses ours;
  constexpr std::string_view kNames = "-LMNPWW";

  std::mt19937 rng(20261201);
  std::vector<uint32_t> alphabet = {' ',    ' ',     '\n',   '\r',   '\t',   0x0B,   0x85,   0xA0,
                                    0,      1,       0xAD,   0x200B, 0x200D, 0x2028, 0x3000, '1',
                                    '2',    'a',     'Z',    '\'',   '_',    '-',    '.',    0xB2,
                                    0x301,  0x4E00,  0x9FA5, 0x9FA6, 0x3040, 0x3042, 0x3099, 0x309B,
                                    0x30A0, 0x30FB,  0x30FC, 0x30FF, 0x3100, 0xFF11, 0xFF5C, 0x2581,
                                    0xE000, 0x1F600, 0x0903, 0x660,  0x2160, 0xD7A3, 0x20E3};
  size_t num_different = 0;
  for (uint32_t c = 0; c <= 0x10FFFF; c += c < 0x3200 ? 1 : 17) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    if (c == 0x180E) continue;  // PCRE2 still counts the Mongolian vowel separator as space
    if (RegexClass(c, classes) != kNames[static_cast<size_t>(ours.Of(c))]) {
      ++num_different;
      EXPECT_EQ(RegexClass(c, classes), '-') << std::hex << c;  // only newly assigned ones differ
    } else if (rng() % 64 == 0) {
      alphabet.push_back(c);
    }
  }
  EXPECT_LT(num_different, 400u);

  const PreTokenizer scanner;
  for (int round = 0; round < 30000; ++round) {
    std::string text;
    const size_t length = rng() % 24;
    for (size_t i = 0; i < length; ++i) {
      // Half of the characters come from the hand-picked front of the alphabet.
      AppendUtf8(alphabet[rng() % (rng() % 2 == 0 ? 47 : alphabet.size())], &text);
    }
    std::vector<std::string_view> expected;
    if (!text.empty()) expected = words.Apply(cjk.Apply(numbers.Apply({text})));
    std::vector<std::string_view> pieces;
    scanner.Split(text, &pieces);
    ASSERT_EQ(pieces, expected) << "round " << round << " text " << testing::PrintToString(text);
  }
}

std::vector<std::string> Pieces(std::string_view text,
                                const PreTokenizer& scanner = PreTokenizer()) {
  std::vector<std::string_view> pieces;
  scanner.Split(text, &pieces);
  return {pieces.begin(), pieces.end()};
}

TEST(PreTokenizer, KnownCuts) {
  EXPECT_THAT(Pieces("don't 12345"), ElementsAre("don", "'t", " ", "123", "45"));
  EXPECT_THAT(Pieces("a  b\n\n  c "), ElementsAre("a", " ", " b", "\n\n", " ", " c", " "));
  EXPECT_THAT(Pieces(std::string_view("\0\0a", 3)),
              ElementsAre(std::string(1, '\0'), std::string("\0a", 2)));
}

TEST(PreTokenizer, InvalidBytesAreCoveredToo) {
  const PreTokenizer scanner;
  std::mt19937 rng(7);
  for (int round = 0; round < 2000; ++round) {
    std::string text;
    for (size_t i = rng() % 20; i > 0; --i)
      text.push_back(static_cast<char>(rng() & 0xFF));
    std::string joined;
    for (const std::string& piece : Pieces(text, scanner))
      joined += piece;
    ASSERT_EQ(joined, text);
  }
}

}  // namespace
}  // namespace twinspark::gateway
