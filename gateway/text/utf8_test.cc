// Goal: the decoder agrees with the table of well-formed sequences for every code point and for the
// classic malformed ones. Method: exhaustive encode-decode, then hand-made broken strings.
#include "gateway/text/utf8.h"

#include <gtest/gtest.h>

namespace twinspark::gateway {
namespace {

TEST(Utf8, EveryCodePointSurvives) {
  for (uint32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c <= 0xDFFF) continue;
    std::string text;
    AppendUtf8(c, &text);
    const CodePoint cp = DecodeUtf8(text, 0);
    ASSERT_EQ(cp.value, c);
    ASSERT_EQ(cp.length, text.size());
    ASSERT_EQ(IncompleteUtf8Tail(text), 0u);
    for (size_t cut = 1; cut < text.size(); ++cut) {
      ASSERT_FALSE(IsValidUtf8(text.substr(0, cut)));
      ASSERT_EQ(IncompleteUtf8Tail(text.substr(0, cut)), cut) << c;
    }
  }
}

std::string Repaired(std::string_view bytes) {
  std::string out;
  AppendUtf8Repaired(bytes, &out);
  return out;
}

TEST(Utf8, OneReplacementPerMaximalSubpart) {
  EXPECT_EQ(Repaired("\xC0\x80"), "\uFFFD\uFFFD");            // overlong
  EXPECT_EQ(Repaired("\xED\xA0\x80"), "\uFFFD\uFFFD\uFFFD");  // surrogate
  EXPECT_EQ(Repaired("\xF4\x90\x80\x80"), "\uFFFD\uFFFD\uFFFD\uFFFD");
  EXPECT_EQ(Repaired("\xE2\x82"
                     "a"),
            "\uFFFD"
            "a");  // truncated, two bytes, one mark
  EXPECT_EQ(Repaired("\xF0\x9F\x98"
                     "\xF0\x9F\x98\x80"),
            "\uFFFD\U0001F600");
  EXPECT_EQ(Repaired("\x80"), "\uFFFD");
}

TEST(Utf8, InvalidTailIsNotIncomplete) {
  EXPECT_EQ(IncompleteUtf8Tail("\xE0\x80"), 0u);  // E0 wants A0..BF next
  EXPECT_EQ(IncompleteUtf8Tail("\x80"), 0u);
  EXPECT_EQ(IncompleteUtf8Tail("\xFF"), 0u);
  EXPECT_EQ(IncompleteUtf8Tail(""), 0u);
}

}  // namespace
}  // namespace twinspark::gateway
