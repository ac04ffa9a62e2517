// The rules of token normalisation one by one, and the demo model's map as a whole.
#include "engram_service/tools/token_map_builder.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/file_util.h"

namespace twinspark::engram {
namespace {

std::string Normal(const std::string& text) {
  const auto out = NormalizeTokenText(text);
  EXPECT_TRUE(out.ok()) << out.status();
  return out.ok() ? *out : "?";
}

TEST(NormalizeTokenText, Rules) {
  EXPECT_EQ(Normal(" The"), "the");
  EXPECT_EQ(Normal("THE"), "the");
  EXPECT_EQ(Normal("\xEF\xAC\x81"), "fi");  // ligature
  EXPECT_EQ(Normal("\xC3\x89"), "e");       // E with acute
  EXPECT_EQ(Normal("\n\t "), " ");          // blanks fold into one class
  EXPECT_EQ(Normal(" "), " ");
  EXPECT_EQ(Normal("\xE3\x80\x80"), " ");  // ideographic space becomes a space
  EXPECT_EQ(Normal("\x0B"), "");           // other white space is stripped
  EXPECT_EQ(Normal("a  \n b"), "a b");
  EXPECT_EQ(Normal("\xCE\xA3"), "\xCF\x83");  // no final-sigma rule
  EXPECT_EQ(Normal("\xC4\xB0"), "i");         // dotted capital I
}

TEST(BuildTokenMap, SmallVocabulary) {
  // U+0120 is the byte-level space; U+00C3 alone is half a character.
  const auto map = BuildTokenMap(R"({"model":{"vocab":
      {"<s>":0,"The":1,"\u0120the":2,"\u0120":3,"\u010A":4,"\u00C3":5,"\u00c3\u00a3":6,"a":7}},
      "added_tokens":[{"id":8,"content":"A"}]})");
  ASSERT_TRUE(map.ok()) << map.status();
  // Token 6 is the byte sequence C3 A3, a with tilde: class of "a", first used by itself.
  EXPECT_EQ(*map, (std::vector<int32_t>{0, 1, 1, 2, 2, 3, 4, 4, 4}));
}

TEST(BuildTokenMap, RefusesWhatIsNotATokenizer) {
  EXPECT_FALSE(BuildTokenMap("{").ok());
  EXPECT_FALSE(BuildTokenMap("{}").ok());
  EXPECT_FALSE(BuildTokenMap(R"({"model":{"vocab":{"a":0,"b":2}}})").ok());
  EXPECT_FALSE(BuildTokenMap(R"({"model":{"vocab":{"a":-1}}})").ok());
  EXPECT_FALSE(BuildTokenMap(R"({"model":{"vocab":{"a":"x"}}})").ok());
}

TEST(BuildTokenMap, DemoModel) {
  const std::string dir = TWINSPARK_DEMO_MODEL;
  const auto json = ReadFile(dir + "/tokenizer.json", size_t{1} << 28);
  ASSERT_TRUE(json.ok());
  const auto map = BuildTokenMap(*json);
  ASSERT_TRUE(map.ok()) << map.status();
  std::string bytes;
  for (const int32_t value : *map) {
    for (int i = 0; i < 4; ++i)
      bytes.push_back(static_cast<char>(value >> (8 * i)));
  }
  EXPECT_EQ(bytes, *ReadFile(dir + "/token_map_i32.bin", size_t{1} << 28));
}

}  // namespace
}  // namespace twinspark::engram
