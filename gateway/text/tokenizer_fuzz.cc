// Any bytes through the tokenizer: pieces cover the text, decoding gives it back, parse mode and
// plain mode agree on text without added tokens, and the detokenizer emits only valid UTF-8.
#include "gateway/text/tokenizer.h"

#include <string>
#include <string_view>

#include "common/check.h"
#include "common/testing/fuzz_driver.h"
#include "gateway/text/detokenizer.h"
#include "gateway/text/utf8.h"

namespace {

using twinspark::gateway::Detokenizer;
using twinspark::gateway::IsValidUtf8;
using twinspark::gateway::Tokenizer;

const Tokenizer& DemoTokenizer() {
  static const Tokenizer* const kTokenizer =
      Tokenizer::Load(std::string(TWINSPARK_SOURCE_DIR) + "/deploy/demo_model/tokenizer.json")
          .value()
          .release();
  return *kTokenizer;
}

std::vector<std::string> Seeds() {
  return {"Hello, world! 12345 don't\n\n  x", "价格は100円です テスト・ー",
          "a\u0301\u200d \u00ad\u3000\r\n\t", "<｜User｜></think><think>｜DSML｜ calls>",
          "\xF0\x9F\x98\x80\xF0\x9F\x98 \xFF\xC0\x80"};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const Tokenizer& tokenizer = DemoTokenizer();
  std::vector<std::string_view> pieces;
  tokenizer.pre_tokenizer().Split(text, &pieces);
  size_t covered = 0;
  for (const std::string_view piece : pieces) {
    CHECK(!piece.empty() && piece.data() == text.data() + covered);
    covered += piece.size();
  }
  CHECK_EQ(covered, size);
  std::vector<int32_t> plain;
  tokenizer.EncodePlain(text, &plain);
  CHECK(tokenizer.DecodeBytes(plain) == text);
  std::vector<int32_t> parsed;
  tokenizer.EncodeParse(text, &parsed);
  CHECK(tokenizer.DecodeBytes(parsed) == text);
  Detokenizer detokenizer(tokenizer);
  for (const int32_t id : parsed) {
    std::string piece;
    if (tokenizer.IsAdded(id)) detokenizer.Flush(&piece);
    detokenizer.Push(id, &piece);
    CHECK(IsValidUtf8(piece));
    CHECK(detokenizer.num_pending() <= 3);
  }
  return 0;
}

TWINSPARK_FUZZ_MAIN(Seeds())
