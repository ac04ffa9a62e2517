// Goal: reasoning, content, stop strings and counts as the specification's stream rules say.
// Method: token sequences of the demo vocabulary, markers as tokens and as letters.
#include "gateway/text/output_parser.h"

#include <gtest/gtest.h>

#include "common/check.h"
#include "gateway/text/text_model.h"

namespace twinspark::gateway {
namespace {

const TextModel& DemoText() {
  static const TextModel* const kModel = [] {
    absl::StatusOr<TextModel> model =
        TextModel::Load(std::string(TWINSPARK_SOURCE_DIR) + "/deploy/demo_model");
    CHECK(model.ok()) << model.status();
    return new TextModel(*std::move(model));
  }();
  return *kModel;
}

struct Result {
  std::string reasoning;
  std::string content;
  std::optional<std::string> stopped_by;
  int32_t num_tokens = 0;
  int32_t num_reasoning_tokens = 0;
};

// Pushes the tokens of `text` (markers by their spelling become tokens) until the parser is done.
Result Parse(std::string_view text, OutputOptions options) {
  std::vector<int32_t> ids;
  DemoText().tokenizer->EncodeParse(text, &ids);
  OutputParser parser(*DemoText().tokenizer, DemoText().tokens, std::move(options));
  std::vector<OutputEvent> events;
  for (const int32_t id : ids) {
    if (parser.done()) break;
    parser.Push(id, &events);
  }
  parser.Finish(&events);
  Result result;
  for (const OutputEvent& event : events) {
    EXPECT_FALSE(event.text.empty());
    (event.kind == OutputEvent::Kind::kReasoning ? result.reasoning : result.content) += event.text;
  }
  result.stopped_by = parser.stopped_by();
  result.num_tokens = parser.num_tokens();
  result.num_reasoning_tokens = parser.num_reasoning_tokens();
  return result;
}

OutputOptions Thinking(std::vector<std::string> stop = {}) {
  OutputOptions options;
  options.starts_in_reasoning = true;
  options.stop = std::move(stop);
  return options;
}

TEST(OutputParser, SplitsAtTheMarkerToken) {
  const Result result = Parse("\nThink.\n</think>\n\nHello.\n<｜end▁of▁sentence｜>", Thinking());
  EXPECT_EQ(result.reasoning, "\nThink.\n");
  EXPECT_EQ(result.content, "\n\nHello.\n");
}

TEST(OutputParser, StrayMarkersAreAbsorbed) {
  const Result twice = Parse("<think>a</think>b</think>c", Thinking());
  EXPECT_EQ(twice.reasoning, "a");
  EXPECT_EQ(twice.content, "bc");
  const Result opened = Parse("<think>hm</think>ok", OutputOptions());
  EXPECT_EQ(opened.reasoning, "hm");
  EXPECT_EQ(opened.content, "ok");
}

TEST(OutputParser, LettersAreNoMarkers) {
  std::vector<int32_t> ids;
  DemoText().tokenizer->EncodePlain("</think>x", &ids);
  OutputParser parser(*DemoText().tokenizer, DemoText().tokens, Thinking());
  std::vector<OutputEvent> events;
  for (const int32_t id : ids)
    parser.Push(id, &events);
  parser.Finish(&events);
  ASSERT_EQ(events.size(), 1u);
  EXPECT_EQ(events[0].kind, OutputEvent::Kind::kReasoning);
  EXPECT_EQ(events[0].text, "</think>x");
}

TEST(OutputParser, StopStringsOnlyInContent) {
  Result result = Parse("has STOP here</think>and STOP there", Thinking({"STOP"}));
  EXPECT_EQ(result.reasoning, "has STOP here");
  EXPECT_EQ(result.content, "and ");
  EXPECT_EQ(result.stopped_by, "STOP");
  OutputOptions options;
  options.stop = {"STOP"};
  options.include_stop = true;
  EXPECT_EQ(Parse("x STOP y", options).content, "x STOP");
  EXPECT_EQ(Parse("x ST", options).content, "x ST");
  options.min_tokens = 1000;
  EXPECT_EQ(Parse("x STOP y", options).content, "x STOP y");
}

TEST(OutputParser, CountsTokensOfTheReasoning) {
  std::vector<int32_t> ids;
  DemoText().tokenizer->EncodePlain("one two three", &ids);
  const Result result = Parse("one two three</think>four", Thinking());
  EXPECT_EQ(result.num_reasoning_tokens, static_cast<int32_t>(ids.size()));
}

TEST(OutputParser, OtherAddedTokens) {
  const std::string text = "a<｜User｜>b<｜box｜>c｜DSML｜d";
  EXPECT_EQ(Parse(text, OutputOptions()).content, "ab<｜box｜>c｜DSML｜d");
  OutputOptions all;
  all.skip_special_tokens = false;
  EXPECT_EQ(Parse(text, all).content, text);
  OutputOptions completions;
  completions.is_chat = false;
  EXPECT_EQ(Parse("a<think>b" + text, completions).content, "abab<｜box｜>cd");
}

}  // namespace
}  // namespace twinspark::gateway
