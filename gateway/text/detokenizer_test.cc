// Goal: pieces are valid UTF-8, never half a character, and join to the repaired whole. Method:
// random ids of the demo vocabulary, whose single-byte tokens make every kind of broken sequence.
#include "gateway/text/detokenizer.h"

#include <gtest/gtest.h>

#include "common/testing/seeded_rng.h"
#include "gateway/text/utf8.h"

namespace twinspark::gateway {
namespace {

TEST(Detokenizer, PiecesAreWholeAndJoinToTheRepairedText) {
  const auto tokenizer =
      Tokenizer::Load(std::string(TWINSPARK_SOURCE_DIR) + "/deploy/demo_model/tokenizer.json");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  SeededRng rng(TestSeed(3));
  for (int round = 0; round < 5000; ++round) {
    Detokenizer detokenizer(**tokenizer);
    std::vector<int32_t> ids;
    std::string joined;
    for (int64_t i = rng.Int(0, 20); i > 0; --i) {
      // Ids 3 to 258 are the single bytes.
      ids.push_back(static_cast<int32_t>(rng.OneIn(3) ? rng.Int(3, 4036) : rng.Int(100, 258)));
      std::string piece;
      detokenizer.Push(ids.back(), &piece);
      ASSERT_TRUE(IsValidUtf8(piece));
      ASSERT_LE(detokenizer.num_pending(), 3u);
      joined += piece;
    }
    detokenizer.Flush(&joined);
    std::string expected;
    AppendUtf8Repaired((*tokenizer)->DecodeBytes(ids), &expected);
    ASSERT_EQ(joined, expected);
  }
}

TEST(Detokenizer, UnknownIdsAddNothing) {
  const auto tokenizer =
      Tokenizer::Load(std::string(TWINSPARK_SOURCE_DIR) + "/deploy/demo_model/tokenizer.json");
  ASSERT_TRUE(tokenizer.ok());
  Detokenizer detokenizer(**tokenizer);
  std::string out;
  detokenizer.Push(-1, &out);
  detokenizer.Push(1 << 30, &out);
  detokenizer.Flush(&out);
  EXPECT_EQ(out, "");
}

}  // namespace
}  // namespace twinspark::gateway
