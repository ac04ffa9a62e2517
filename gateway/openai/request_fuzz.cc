// The readers of every request body on any JSON: an error with a message, or a request whose prompt
// can be encoded. The first byte chooses the reader.
#include <string>
#include <string_view>

#include "common/check.h"
#include "common/testing/fuzz_driver.h"
#include "gateway/openai/chat_request.h"
#include "gateway/openai/completion_request.h"
#include "gateway/openai/tokenize.h"

namespace {

using namespace twinspark::gateway;  // NOLINT: one file, many names

const TextModel& DemoText() {
  static const TextModel* const kModel = [] {
    absl::StatusOr<TextModel> model =
        TextModel::Load(std::string(TWINSPARK_SOURCE_DIR) + "/deploy/demo_model");
    CHECK(model.ok()) << model.status();
    return new TextModel(*std::move(model));
  }();
  return *kModel;
}

std::vector<std::string> Seeds() {
  return {
      R"(c{"model":"m","messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text","text":"a"}]},{"role":"assistant","reasoning_content":"r","tool_calls":[{"id":"1","function":{"name":"n::f","arguments":"{\"a\":[1,2.5]}"}}]},{"role":"tool","tool_call_id":"1","content":"t"}],"tools":[{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"}},"namespace":{"name":"n"}}],"tool_choice":"auto"})",
      R"(c{"messages":[{"role":"user","content":"x"},{"role":"assistant","content":"y","prefix":true}],"temperature":0.5,"top_p":1,"stop":["a","b"],"logit_bias":{"5":1},"bad_words":["no"],"seed":-5,"n":2,"logprobs":true,"top_logprobs":3,"thinking":{"type":"disabled"},"response_format":{"type":"json_schema","json_schema":{"name":"n","schema":{"a":1e20}}},"stream":true,"stream_options":{"include_usage":true}})",
      R"(t{"prompt":["a","<think>b"],"max_tokens":0,"echo":true,"logprobs":2,"min_tokens":0,"truncate_prompt_tokens":1})",
      R"(t{"prompt":[[1,2],[3]],"best_of":1})",
      R"(k{"messages":[{"role":"user","content":"x"}],"return_token_strs":true})",
      R"(d{"tokens":[1,2,300,4095]})"};
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const auto body =
      Json::Parse(std::string_view(reinterpret_cast<const char*>(data) + 1, size - 1));
  if (!body.ok() || !body->is_object()) return 0;
  const TextModel& text = DemoText();
  FieldLimits limits;
  limits.vocab_size = text.tokenizer->vocab_size();
  std::optional<ApiError> error;
  switch (data[0]) {
    case 't': {
      const CompletionRequest request =
          ReadCompletionRequest(*body, text, limits, {"m"}, {}, &error);
      CHECK(error.has_value() || !request.prompts.empty());
      break;
    }
    case 'k':
      Tokenize(*body, text, 100, {}, &error);
      break;
    case 'd':
      Detokenize(*body, text, limits.vocab_size, &error);
      break;
    default: {
      const ChatRequest request = ReadChatRequest(*body, text, limits, {"m"}, &error);
      if (error.has_value()) break;
      const auto segments = EncodeChat(request.messages, request.options, text.tokens);
      CHECK(segments.ok()) << segments.status();
      std::vector<int32_t> ids;
      CHECK(SegmentIds(*segments, *text.tokenizer, &ids) && !ids.empty());
    }
  }
  CHECK(!error.has_value() || !error->message.empty());
  return 0;
}

TWINSPARK_FUZZ_MAIN(Seeds())
