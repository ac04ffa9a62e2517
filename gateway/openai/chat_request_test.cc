// Goal: a request body gives the prompt, thinking switch and errors that the specification lists.
// Method: the case files of tests/golden/data/chat are run through the readers with the demo
// model's tokenizer (prompts are compared as text; ids belong to the tokenizer tests).
#include "gateway/openai/chat_request.h"

#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/check.h"
#include "common/file_util.h"
#include "gateway/openai/completion_request.h"

namespace twinspark::gateway {
namespace {

constexpr int32_t kReleasedVocab = 129280;
constexpr size_t kMaxFileBytes = 16 << 20;

const TextModel& DemoText() {
  static const TextModel* const kModel = [] {
    absl::StatusOr<TextModel> model =
        TextModel::Load(std::string(TWINSPARK_SOURCE_DIR) + "/deploy/demo_model");
    CHECK(model.ok()) << model.status();
    return new TextModel(*std::move(model));
  }();
  return *kModel;
}

Json Cases(const std::string& name) {
  const absl::StatusOr<std::string> text = ReadFile(
      std::string(TWINSPARK_SOURCE_DIR) + "/tests/golden/data/chat/" + name, kMaxFileBytes);
  CHECK(text.ok()) << text.status();
  absl::StatusOr<Json> json = Json::Parse(*text);
  CHECK(json.ok()) << json.status();
  return *json->Find("cases");
}

FieldLimits Limits() {
  FieldLimits limits;
  limits.vocab_size = kReleasedVocab;
  limits.has_prompt_logprobs = true;
  return limits;
}

std::string TextOf(const Json& value) {
  return value.is_string() ? value.as_string() : std::string();
}

TEST(ChatRequest, PromptsOfTheSpecification) {
  size_t num_prompts = 0;
  const Json cases = Cases("api_prompt.json");
  for (const Json& test : cases.as_array()) {
    const std::string name = TextOf(*test.Find("name"));
    std::optional<ApiError> error;
    const ChatRequest request =
        ReadChatRequest(*test.Find("request"), DemoText(), Limits(), {"m"}, &error);
    const Json* choice = test.Find("request")->Find("tool_choice");
    const bool is_forced =
        choice != nullptr &&
        !(choice->is_string() && (choice->as_string() == "none" || choice->as_string() == "auto"));
    if (is_forced) {  // enforcing a call is refused
      ASSERT_TRUE(error.has_value()) << name;
      EXPECT_EQ(error->param, "tool_choice") << name;
      continue;
    }
    if (absl::StrContains(name, "image_request")) {
      ASSERT_TRUE(error.has_value()) << name;
      EXPECT_THAT(error->message, testing::HasSubstr("does not accept images"));
      continue;
    }
    if (const Json* wanted = test.Find("error")) {
      ASSERT_TRUE(error.has_value()) << name;
      EXPECT_EQ(error->param, TextOf(*wanted->Find("param"))) << name;
      continue;
    }
    ASSERT_FALSE(error.has_value()) << name << ": " << error->message;
    EXPECT_EQ(request.options.thinking, test.Find("thinking")->as_bool()) << name;
    if (request.options.thinking) {
      EXPECT_EQ(request.options.effort, test.Find("effort")->ToInt64()) << name;
    }
    const auto segments = EncodeChat(request.messages, request.options, DemoText().tokens);
    ASSERT_TRUE(segments.ok()) << name;
    EXPECT_EQ(SegmentText(*segments, *DemoText().tokenizer), TextOf(*test.Find("prompt"))) << name;
    ++num_prompts;
  }
  EXPECT_GE(num_prompts, 30u);
}

TEST(ChatRequest, ErrorsOfTheSpecification) {
  size_t num_errors = 0;
  const Json cases = Cases("api_errors.json");
  for (const Json& test : cases.as_array()) {
    const std::string name = TextOf(*test.Find("name"));
    const Json* body = test.Find("body");
    const std::string endpoint = TextOf(*test.Find("endpoint"));
    if (body == nullptr || test.Find("server") != nullptr) continue;  // see openai_api_test
    std::optional<ApiError> error;
    if (endpoint == "/v1/chat/completions") {
      ReadChatRequest(*body, DemoText(), Limits(), {"m"}, &error);
    } else if (endpoint == "/v1/completions") {
      ReadCompletionRequest(*body, DemoText(), Limits(), {"m"}, &error);
    } else {
      continue;
    }
    const int64_t status = *test.Find("status")->ToInt64();
    EXPECT_EQ(error.has_value() ? error->status : 200, status)
        << name << ": " << (error.has_value() ? error->message : "accepted");
    if (!error.has_value() || status == 200) continue;
    ++num_errors;
    const Json& wanted = *test.Find("error");
    EXPECT_EQ(error->type, TextOf(*wanted.Find("type"))) << name;
    EXPECT_EQ(error->param, TextOf(*wanted.Find("param"))) << name;
    EXPECT_EQ(error->code, TextOf(*wanted.Find("code"))) << name;
    EXPECT_TRUE(absl::StrContains(absl::AsciiStrToLower(error->message),
                                  absl::AsciiStrToLower(TextOf(*test.Find("message_contains")))))
        << name << ": " << error->message;
  }
  EXPECT_GE(num_errors, 60u);
}

TEST(ChatRequest, WhatFitsTheContext) {
  const Json cases = Cases("context_limits.json");
  for (const Json& test : cases.as_array()) {
    if (test.Find("clamp") != nullptr) continue;  // an option that this server does not have
    std::optional<int32_t> requested;
    if (const auto value = test.Find("max_tokens")->ToInt64()) {
      requested = static_cast<int32_t>(*value);
    }
    std::optional<ApiError> error;
    const std::optional<int32_t> fits =
        TokensThatFit(*test.Find("max_model_len")->ToInt64(), *test.Find("prompt")->ToInt64(),
                      requested, "messages", &error);
    if (const Json* effective = test.Find("effective")) {
      EXPECT_EQ(fits, effective->ToInt64());
    } else {
      ASSERT_TRUE(error.has_value());
      EXPECT_EQ(error->message, TextOf(*test.Find("error")));
      EXPECT_EQ(error->code, "context_length_exceeded");
    }
  }
}

TEST(ChatRequest, UnbuiltFieldsAreNamed) {
  for (const char* field :
       {R"("tool_choice":"required","tools":[{"function":{"name":"f"}}])", R"("guided_regex":"a")",
        R"("thinking_token_budget":5)", R"("parallel_tool_calls":false)", R"("priority":1)",
        R"("prompt_logprobs":1)", R"("structured_outputs":{"json":{}})"}) {
    const absl::StatusOr<Json> body =
        Json::Parse(std::string(R"({"messages":[{"role":"user","content":"x"}],)") + field + "}");
    ASSERT_TRUE(body.ok()) << field;
    std::optional<ApiError> error;
    FieldLimits limits = Limits();
    limits.has_prompt_logprobs = false;
    ReadChatRequest(*body, DemoText(), limits, {"m"}, &error);
    ASSERT_TRUE(error.has_value()) << field;
    EXPECT_EQ(error->status, 400);
    EXPECT_TRUE(absl::StrContains(field, error->param.substr(0, error->param.find('.'))))
        << error->param;
    EXPECT_THAT(error->message, testing::HasSubstr("not supported"));
  }
}

}  // namespace
}  // namespace twinspark::gateway
