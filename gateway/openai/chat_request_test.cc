// Goal: a request body gives the prompt, thinking switch and errors that the specification lists.
// Method: the case files of tests/golden/data/chat are run through the readers with the demo
// model's tokenizer (prompts are compared as text; ids belong to the tokenizer tests).
#include "gateway/openai/chat_request.h"

#include <cmath>
#include <functional>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/check.h"
#include "common/file_util.h"
#include "common/sampling_bounds.h"
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
      ReadCompletionRequest(*body, DemoText(), Limits(), {"m"}, {}, &error);
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
                      /*is_cut=*/false, requested, "messages", &error);
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
        R"("structured_outputs":{"json":{}})"}) {
    const absl::StatusOr<Json> body =
        Json::Parse(std::string(R"({"messages":[{"role":"user","content":"x"}],)") + field + "}");
    ASSERT_TRUE(body.ok()) << field;
    std::optional<ApiError> error;
    ReadChatRequest(*body, DemoText(), Limits(), {"m"}, &error);
    ASSERT_TRUE(error.has_value()) << field;
    EXPECT_EQ(error->status, 400);
    EXPECT_TRUE(absl::StrContains(field, error->param.substr(0, error->param.find('.'))))
        << error->param;
    EXPECT_THAT(error->message, testing::HasSubstr("not supported"));
  }
}

// ---- Sampling fields: the API refuses exactly what the engine would refuse.

std::optional<ApiError> ChatError(const std::string& more, SamplingParams* sampling = nullptr) {
  const auto body =
      Json::Parse(absl::StrCat(R"({"messages":[{"role":"user","content":"x"}],)", more, "}"));
  CHECK(body.ok()) << body.status() << more;
  std::optional<ApiError> error;
  const ChatRequest request = ReadChatRequest(*body, DemoText(), Limits(), {"m"}, &error);
  if (sampling != nullptr) *sampling = request.common.sampling;
  return error;
}

struct NumberField {
  const char* key;
  sampling_bounds::Range range;
  std::function<void(SamplingParams&, double)> set;
  bool is_integer = false;
  bool is_positive = false;  // greater than 0, however little
  const char* before = "";   // in front of the value, and behind it
  const char* after = "";
  const char* other = "";  // another field that this one needs

  std::string json(const std::string& value) const {
    return absl::StrCat(other, "\"", key, "\":", before, value, after);
  }
};

std::vector<NumberField> NumberFields() {
  namespace bounds = sampling_bounds;
  const auto real = [](float SamplingParams::*member) {
    return [member](SamplingParams& p, double v) { p.*member = static_cast<float>(v); };
  };
  const auto integer = [](int32_t SamplingParams::*member) {
    return [member](SamplingParams& p, double v) { p.*member = static_cast<int32_t>(v); };
  };
  return {
      {"temperature", bounds::kTemperature, real(&SamplingParams::temperature)},
      {"top_p", bounds::kTopP, real(&SamplingParams::top_p), false, true},
      {"min_p", bounds::kMinP, real(&SamplingParams::min_p)},
      {"repetition_penalty", bounds::kRepetitionPenalty, real(&SamplingParams::repetition_penalty),
       false, true},
      {"presence_penalty", bounds::kPresencePenalty, real(&SamplingParams::presence_penalty)},
      {"frequency_penalty", bounds::kFrequencyPenalty, real(&SamplingParams::frequency_penalty)},
      {"min_tokens", bounds::kMinTokens, integer(&SamplingParams::min_tokens), true},
      {"prompt_logprobs", bounds::kLogprobs, integer(&SamplingParams::num_prompt_logprobs), true},
      {"top_logprobs", bounds::kLogprobs, integer(&SamplingParams::num_logprobs), true, false, "",
       "", "\"logprobs\":true,"},
      {"logit_bias", bounds::kLogitBias,
       [](SamplingParams& p, double v) {
         p.logit_bias = {{5, static_cast<float>(v)}};
       },
       false, false, "{\"5\":", "}"},
  };
}

TEST(SamplingFields, TheApiAndTheEngineHaveTheSameBounds) {
  for (const NumberField& field : NumberFields()) {
    const auto beyond = [&](double value, double direction) {
      if (field.is_integer) return value + direction;
      return static_cast<double>(
          std::nextafterf(static_cast<float>(value), static_cast<float>(direction) * HUGE_VALF));
    };
    const double low = field.range.low, high = field.range.high;
    for (const double value : {low, high, (low + high) / 2, beyond(low, -1), beyond(high, 1),
                               high + 1000, -1e6 - high}) {
      const double v = field.is_integer ? std::floor(value) : value;
      if (field.is_integer && v == -1) continue;  // "not asked for" inside
      const std::string json = field.json(absl::StrFormat("%.17g", v));
      SamplingParams from_api, raw;
      const std::optional<ApiError> error = ChatError(json, &from_api);
      field.set(raw, v);
      const auto problem = FindSamplingProblem(raw, kReleasedVocab);
      // A denormal float above 0: the API raises it to the smallest that is allowed.
      const bool is_raised = field.is_positive && v > 0 && v < low;
      EXPECT_EQ(error.has_value(), problem.has_value() && !is_raised)
          << json << (error.has_value() ? " API: " + error->message : "")
          << (problem.has_value() ? " engine: " + problem->message : "");
      if (error.has_value()) {
        EXPECT_EQ(error->param, field.key) << json;
      } else {
        EXPECT_FALSE(FindSamplingProblem(from_api, kReleasedVocab).has_value()) << json;
      }
    }
  }
  for (const char* tiny : {"1e-30", "1e-300", "1e-45"}) {
    for (const char* key : {"top_p", "repetition_penalty"}) {
      SamplingParams sampling;
      EXPECT_FALSE(ChatError(absl::StrCat("\"", key, "\":", tiny), &sampling).has_value());
      EXPECT_FALSE(FindSamplingProblem(sampling, kReleasedVocab).has_value()) << key << tiny;
    }
  }
  EXPECT_TRUE(ChatError("\"top_k\":-2").has_value());
  EXPECT_TRUE(ChatError("\"top_k\":2147483648").has_value());
  for (const char* top_k : {"-1", "0", "2147483647"}) {
    SamplingParams sampling;
    EXPECT_FALSE(ChatError(absl::StrCat("\"top_k\":", top_k), &sampling).has_value());
    EXPECT_FALSE(FindSamplingProblem(sampling, kReleasedVocab).has_value());
  }
}

TEST(SamplingFields, TheApiAndTheEngineTakeListsOfTheSameLength) {
  namespace bounds = sampling_bounds;
  const auto list = [](size_t n, const std::function<std::string(size_t)>& item) {
    std::string out;
    for (size_t i = 0; i < n; ++i)
      absl::StrAppend(&out, out.empty() ? "" : ",", item(i));
    return out;
  };
  const auto number = [](size_t i) { return absl::StrCat(i + 10); };
  struct ListField {
    const char* key;
    size_t most;
    std::function<std::string(size_t)> json;
  };
  const ListField fields[] = {
      {"stop_token_ids", bounds::kMaxStopTokenIds,
       [&](size_t n) { return absl::StrCat("[", list(n, number), "]"); }},
      {"logit_bias", bounds::kMaxLogitBiases,
       [&](size_t n) {
         const auto entry = [](size_t i) { return absl::StrCat("\"", i, "\":1"); };
         return absl::StrCat("{", list(n, entry), "}");
       }},
      {"bad_words", bounds::kMaxBadWords,
       [&](size_t n) {
         const auto word = [](size_t i) { return absl::StrCat("\"w", i, "\""); };
         return absl::StrCat("[", list(n, word), "]");
       }},
      {"allowed_token_ids", kReleasedVocab - 10,  // the next id is outside
       [&](size_t n) { return absl::StrCat("[", list(n, number), "]"); }},
  };
  for (const ListField& field : fields) {
    SamplingParams sampling;
    const auto fits =
        ChatError(absl::StrCat("\"", field.key, "\":", field.json(field.most)), &sampling);
    EXPECT_FALSE(fits.has_value()) << field.key << ": " << fits->message;
    EXPECT_FALSE(FindSamplingProblem(sampling, kReleasedVocab).has_value()) << field.key;
    const auto error = ChatError(absl::StrCat("\"", field.key, "\":", field.json(field.most + 1)));
    ASSERT_TRUE(error.has_value()) << field.key;
    EXPECT_EQ(error->param, field.key);
    // One more than the API lets through is too many for the engine as well.
    if (field.key == std::string("stop_token_ids")) sampling.stop_token_ids.push_back(3);
    if (field.key == std::string("logit_bias")) sampling.logit_bias.emplace_back(3, 1.0f);
    if (field.key == std::string("bad_words")) sampling.bad_words.push_back({3});
    if (field.key == std::string("allowed_token_ids")) {
      sampling.allowed_token_ids.push_back(kReleasedVocab);
    }
    const auto problem = FindSamplingProblem(sampling, kReleasedVocab);
    ASSERT_TRUE(problem.has_value()) << field.key;
    EXPECT_EQ(problem->field, field.key);
  }
  EXPECT_FALSE(ChatError("\"stop_token_ids\":[]").has_value());
}

TEST(SamplingFields, ADrawnSeedMayBeAskedFor) {
  for (int i = 0; i < 64; ++i) {
    SamplingParams drawn, asked;
    ASSERT_FALSE(ChatError("\"top_p\":1", &drawn).has_value());
    const std::string json = absl::StrCat("\"seed\":", drawn.seed);
    ASSERT_FALSE(ChatError(json, &asked).has_value()) << json;
    EXPECT_EQ(asked.seed, drawn.seed);
  }
}

TEST(SamplingFields, ATokenIsLeftToDraw) {
  std::vector<int32_t> ids;
  DemoText().tokenizer->EncodePlain("x", &ids);
  ASSERT_EQ(ids.size(), 1u);
  const std::string x = absl::StrCat(ids[0]), eos = absl::StrCat(DemoText().tokens.eos);
  const std::string dead_ends[] = {
      absl::StrCat("\"allowed_token_ids\":[", x, "],\"bad_words\":[\"x\"]"),
      absl::StrCat("\"allowed_token_ids\":[", eos, "],\"min_tokens\":1,\"max_tokens\":5"),
      absl::StrCat("\"allowed_token_ids\":[7],\"stop_token_ids\":[7],\"min_tokens\":2"),
      absl::StrCat("\"allowed_token_ids\":[", x, ",7],\"bad_words\":[\"x\"],",
                   "\"stop_token_ids\":[7],\"min_tokens\":2"),
  };
  for (const std::string& json : dead_ends) {
    const auto error = ChatError(json);
    ASSERT_TRUE(error.has_value()) << json;
    EXPECT_EQ(error->param, "allowed_token_ids") << json;
  }
  const std::string fine[] = {
      absl::StrCat("\"allowed_token_ids\":[", x, ",7],\"bad_words\":[\"x\"]"),
      absl::StrCat("\"allowed_token_ids\":[", eos, "]"),
      absl::StrCat("\"allowed_token_ids\":[7],\"stop_token_ids\":[7]"),
  };
  for (const std::string& json : fine)
    EXPECT_FALSE(ChatError(json).has_value()) << json;
}

}  // namespace
}  // namespace twinspark::gateway
