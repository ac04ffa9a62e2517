// Goal: ids are right, bounded in time, and decode to the text they came from. Method: a small
// tokenizer.json written here, for merge order and refusals; the demo model's for properties over
// random text. The released vocabulary is compared by golden_chat.
#include "gateway/text/tokenizer.h"

#include <chrono>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/testing/seeded_rng.h"
#include "gateway/text/control_tokens.h"
#include "gateway/text/ordered_json.h"
#include "gateway/text/utf8.h"

namespace twinspark::gateway {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

// 256 single bytes as ids 10.., then merged tokens from 300 on.
std::string SmallTokenizerJson() {
  std::string vocab;
  uint32_t next = 0x100;
  for (uint32_t byte = 0; byte < 256; ++byte) {
    const bool keeps =
        (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    std::string spelling;
    AppendUtf8(keeps ? byte : next++, &spelling);
    std::string quoted;
    AppendJsonString(spelling, &quoted);
    absl::StrAppend(&vocab, quoted, ":", 10 + byte, ",");
  }
  vocab += R"("ab":300,"bc":301,"abc":302,"aa":303,"aaaa":304,"zzz":305)";
  const auto quote = [](std::string_view text) {
    std::string out;
    AppendJsonString(text, &out);
    return out;
  };
  const auto split = [&](std::string_view pattern) {
    return absl::StrCat(R"({"type":"Split","pattern":{"Regex":)", quote(pattern),
                        R"(},"behavior":"Isolated","invert":false})");
  };
  return absl::StrCat(
      R"({"added_tokens":[{"id":0,"content":"<s>"},{"id":1,"content":"<s>>"},{"id":2,"content":"x"}],)"
      R"("normalizer":{"type":"Sequence","normalizers":[]},"pre_tokenizer":{"type":"Sequence",)"
      R"("pretokenizers":[)",
      split(kSplitNumbers), ",", split(kSplitCjk), ",", split(kSplitWords),
      R"(,{"type":"ByteLevel","add_prefix_space":false,"use_regex":false}]},)"
      R"("model":{"type":"BPE","ignore_merges":false,"vocab":{)",
      vocab, R"(},"merges":["b c",["a","b"],"ab c","a a","aa aa"]}})");
}

std::unique_ptr<Tokenizer> SmallTokenizer() {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::FromJson(SmallTokenizerJson());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

std::vector<int32_t> Plain(const Tokenizer& tokenizer, std::string_view text) {
  std::vector<int32_t> ids;
  tokenizer.EncodePlain(text, &ids);
  return ids;
}

TEST(Tokenizer, MergesLowestRankFirstThenLeftmost) {
  const auto tokenizer = SmallTokenizer();
  // "b c" has rank 0, so "abc" becomes a + bc, and "ab c" never applies.
  EXPECT_THAT(Plain(*tokenizer, "abc"), ElementsAre(10 + 'a', 301));
  EXPECT_THAT(Plain(*tokenizer, "aaa"), ElementsAre(303, 10 + 'a'));
  EXPECT_THAT(Plain(*tokenizer, "aaaaa"), ElementsAre(304, 10 + 'a'));
  // A piece that is in the vocabulary but that no merge reaches stays in pieces.
  EXPECT_THAT(Plain(*tokenizer, "zzz"), ElementsAre(10 + 'z', 10 + 'z', 10 + 'z'));
  EXPECT_THAT(Plain(*tokenizer, ""), ElementsAre());
}

TEST(Tokenizer, AddedTokensLeftmostThenLongest) {
  const auto tokenizer = SmallTokenizer();
  std::vector<int32_t> ids;
  tokenizer->EncodeParse("<s>>a<s>xab", &ids);
  EXPECT_THAT(ids, ElementsAre(1, 10 + 'a', 0, 2, 300));
  EXPECT_EQ(Plain(*tokenizer, "<s>").size(), 3u);
  EXPECT_EQ(tokenizer->FindAdded("<s>"), 0);
  EXPECT_EQ(tokenizer->FindAdded("<s"), std::nullopt);
  EXPECT_TRUE(tokenizer->IsAdded(2));
  EXPECT_FALSE(tokenizer->IsAdded(300));
  EXPECT_FALSE(tokenizer->IsAdded(-1));
  EXPECT_EQ(tokenizer->TokenBytes(1 << 20), "");
}

TEST(Tokenizer, RefusesOtherPipelines) {
  const std::string good = SmallTokenizerJson();
  const auto message = [&](std::string_view from, std::string_view to) {
    const std::string bad = absl::StrReplaceAll(good, {{std::string(from), std::string(to)}});
    EXPECT_NE(bad, good) << from;
    const auto result = Tokenizer::FromJson(bad);
    return result.ok() ? std::string("accepted") : std::string(result.status().message());
  };
  EXPECT_THAT(message("\"BPE\"", "\"Unigram\""), HasSubstr("model.type"));
  EXPECT_THAT(message("\"ignore_merges\":false", "\"ignore_merges\":true"), HasSubstr("ignore"));
  EXPECT_THAT(message("{1,3}", "{1,2}"), HasSubstr("split pattern 0"));
  EXPECT_THAT(message("\"normalizers\":[]", "\"normalizers\":[{\"type\":\"NFC\"}]"),
              HasSubstr("normalizer"));
  EXPECT_THAT(message("\"ab c\"", "\"ab q\""), HasSubstr("merge 2"));
  EXPECT_THAT(message("\"ab c\"", "\"abc\""), HasSubstr("merge 2"));
  EXPECT_THAT(message("\"Q\":", "\"QQ\":"), HasSubstr("single byte 81"));
  EXPECT_THAT(message("\"id\":2,", ""), HasSubstr("id of x"));
  EXPECT_FALSE(Tokenizer::FromJson("{}").ok());
  EXPECT_FALSE(Tokenizer::Load("/nonexistent/tokenizer.json").ok());
}

class DemoTokenizer : public ::testing::Test {
 protected:
  static const Tokenizer& Get() {
    static const Tokenizer* const kTokenizer =
        Tokenizer::Load(std::string(TWINSPARK_SOURCE_DIR) + "/deploy/demo_model/tokenizer.json")
            .value()
            .release();
    return *kTokenizer;
  }
};

TEST_F(DemoTokenizer, DecodingIsTheInverseOfEncoding) {
  SeededRng rng(TestSeed(20261201));
  for (int round = 0; round < 3000; ++round) {
    std::string text;
    for (int64_t i = rng.Int(0, 30); i > 0; --i) {
      uint32_t c = static_cast<uint32_t>(rng.OneIn(2) ? rng.Int(0, 0x7F) : rng.Int(0, 0x10FFFF));
      if (c >= 0xD800 && c <= 0xDFFF) c = ' ';
      AppendUtf8(c, &text);
    }
    ASSERT_EQ(Get().DecodeBytes(Plain(Get(), text)), text);
    // Once more: now the pieces come from the cache.
    ASSERT_EQ(Get().DecodeBytes(Plain(Get(), text)), text);
  }
}

TEST_F(DemoTokenizer, ControlTokensAreFoundBySpelling) {
  const auto tokens = ControlTokens::Find(Get());
  ASSERT_TRUE(tokens.ok()) << tokens.status();
  EXPECT_EQ(tokens->bos, 0);
  EXPECT_EQ(tokens->eos, 1);
  EXPECT_EQ(tokens->ClassOf(tokens->think_close), OutputClass::kThinkClose);
  EXPECT_EQ(tokens->ClassOf(tokens->user), OutputClass::kDropped);
  EXPECT_EQ(tokens->ClassOf(100), OutputClass::kOrdinary);
  EXPECT_EQ(tokens->ClassOf(1 << 20), OutputClass::kDropped);
  EXPECT_EQ(tokens->TaskToken("action"), Get().FindAdded("<｜action｜>"));
  EXPECT_EQ(tokens->TaskToken("nothing"), std::nullopt);
  const auto missing = ControlTokens::Find(*SmallTokenizer());
  ASSERT_FALSE(missing.ok());
  EXPECT_THAT(std::string(missing.status().message()), HasSubstr("begin"));
}

// One piece of a megabyte: quadratic merging would take minutes.
TEST_F(DemoTokenizer, AVeryLongPieceIsNoDenialOfService) {
  std::string text;
  SeededRng rng(TestSeed(1));
  for (int i = 0; i < 1000000; ++i)
    text.push_back(static_cast<char>(rng.Int('a', 'z')));
  const auto start = std::chrono::steady_clock::now();
  const std::vector<int32_t> ids = Plain(Get(), text);
  EXPECT_EQ(Get().DecodeBytes(ids), text);
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(60));
}

}  // namespace
}  // namespace twinspark::gateway
