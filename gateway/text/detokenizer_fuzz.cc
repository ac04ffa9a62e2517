// Any token ids through the detokenizer and the output parser: pieces are valid UTF-8 and join to
// the repaired bytes, and the parser's events are whole. Two bytes make an id; the first byte of
// the input chooses the parser's options.
#include <string>

#include "common/check.h"
#include "common/testing/fuzz_driver.h"
#include "gateway/text/output_parser.h"
#include "gateway/text/text_model.h"
#include "gateway/text/utf8.h"

namespace {

using twinspark::gateway::Detokenizer;
using twinspark::gateway::IsValidUtf8;
using twinspark::gateway::OutputEvent;
using twinspark::gateway::OutputOptions;
using twinspark::gateway::OutputParser;
using twinspark::gateway::TextModel;

const TextModel& DemoText() {
  static const TextModel* const kModel = new TextModel(
      TextModel::Load(std::string(TWINSPARK_SOURCE_DIR) + "/deploy/demo_model").value());
  return *kModel;
}

std::vector<std::string> Seeds() {
  std::vector<std::string> seeds;
  for (const char* text : {"Let me think.</think>The answer STOP is \xF0\x9F\x98\x80 円です",
                           "<think>a<｜User｜>b<｜box｜>｜DSML｜ calls><｜end▁of▁sentence｜>"}) {
    std::vector<int32_t> ids;
    DemoText().tokenizer->EncodeParse(text, &ids);
    std::string seed = "\x03";
    for (const int32_t id : ids) {
      seed.push_back(static_cast<char>(id >> 8));
      seed.push_back(static_cast<char>(id & 0xFF));
    }
    seeds.push_back(seed);
  }
  return seeds;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const TextModel& text = DemoText();
  OutputOptions options;
  options.starts_in_reasoning = (data[0] & 1) != 0;
  options.stop = {"STOP", "円で", "ab"};
  options.include_stop = (data[0] & 2) != 0;
  options.skip_special_tokens = (data[0] & 4) != 0;
  options.is_chat = (data[0] & 8) == 0;
  Detokenizer detokenizer(*text.tokenizer);
  OutputParser parser(*text.tokenizer, text.tokens, options);
  std::vector<int32_t> ids;
  std::string joined;
  std::vector<OutputEvent> events;
  for (size_t i = 1; i + 1 < size; i += 2) {
    ids.push_back(data[i] << 8 | data[i + 1]);
    std::string piece;
    detokenizer.Push(ids.back(), &piece);
    CHECK(IsValidUtf8(piece));
    joined += piece;
    if (!parser.done()) parser.Push(ids.back(), &events);
  }
  detokenizer.Flush(&joined);
  std::string expected;
  twinspark::gateway::AppendUtf8Repaired(text.tokenizer->DecodeBytes(ids), &expected);
  CHECK(joined == expected);
  parser.Finish(&events);
  for (const OutputEvent& event : events) {
    CHECK(!event.text.empty() && IsValidUtf8(event.text));
    CHECK(options.is_chat || event.kind == OutputEvent::Kind::kContent);
  }
  CHECK(parser.num_reasoning_tokens() <= parser.num_tokens());
  return 0;
}

TWINSPARK_FUZZ_MAIN(Seeds())
