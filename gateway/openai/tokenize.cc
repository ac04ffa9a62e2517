#include "gateway/openai/tokenize.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"

#include "common/limits.h"
#include "common/string_view.h"
#include "gateway/openai/chat_request.h"
#include "gateway/openai/completion_request.h"
#include "gateway/openai/response_json.h"
#include "gateway/text/chat_template.h"
#include "gateway/text/utf8.h"

namespace twinspark::gateway {
namespace {

std::vector<int32_t> ChatIds(FieldReader& reader, const TextModel& text) {
  ChatRequest request;
  ReadChatPrompt(reader, &request);
  if (reader.failed()) return {};
  const auto segments = EncodeChat(request.messages, request.options, text.tokens);
  if (!segments.ok()) {
    reader.Fail("messages", std::string(ToStd(segments.status().message())));
    return {};
  }
  return SegmentIds(*segments, *text.tokenizer);
}

}  // namespace

std::string Tokenize(const Json& body,
                     const TextModel& text,
                     int64_t max_model_len,
                     std::optional<ApiError>* error) {
  FieldReader reader(body, "", error);
  std::vector<int32_t> ids;
  if (const std::string* prompt = reader.String("prompt")) {
    ids = EncodePrompt(text, *prompt, reader.Bool("add_special_tokens").value_or(true));
  } else if (reader.Get("messages") != nullptr) {
    ids = ChatIds(reader, text);
  } else {
    reader.Fail("prompt", "`prompt` or `messages` is missing.");
  }
  const bool wants_strings = reader.Bool("return_token_strs").value_or(false);
  if (reader.failed()) return {};
  std::string strings = "null";
  if (wants_strings) {
    strings = "[";
    for (const int32_t id : ids) {
      if (strings.size() > 1) strings.push_back(',');
      std::string token;
      AppendUtf8Repaired(text.tokenizer->TokenBytes(id), &token);
      AppendJsonString(token, &strings);
    }
    strings.push_back(']');
  }
  return absl::StrCat("{\"count\":", ids.size(), ",\"max_model_len\":", max_model_len,
                      ",\"tokens\":", IdsJson(ids), ",\"token_strs\":", strings, "}");
}

std::string Detokenize(const Json& body,
                       const TextModel& text,
                       int32_t vocab_size,
                       std::optional<ApiError>* error) {
  FieldReader reader(body, "", error);
  const Json::Array* list = reader.Array("tokens");
  if (list == nullptr) reader.Fail("tokens", "`tokens` is missing.");
  std::vector<int32_t> ids;
  if (list != nullptr && !list->empty()) {
    ids = reader.TokenIds("tokens", limits::kMaxPromptIds, vocab_size)
              .value_or(std::vector<int32_t>());
  }
  if (reader.failed()) return {};
  std::string prompt;
  AppendUtf8Repaired(text.tokenizer->DecodeBytes(ids), &prompt);
  std::string answer = "{\"prompt\":";
  AppendJsonString(prompt, &answer);
  answer.push_back('}');
  return answer;
}

}  // namespace twinspark::gateway
