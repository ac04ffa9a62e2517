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

std::vector<int32_t> ChatIds(FieldReader& reader,
                             const TextModel& text,
                             const EncodeBudget& budget,
                             bool* is_cut) {
  ChatRequest request;
  ReadChatPrompt(reader, &request);
  if (reader.failed()) return {};
  const auto segments = EncodeChat(request.messages, request.options, text.tokens);
  if (!segments.ok()) {
    reader.Fail("messages", std::string(ToStd(segments.status().message())));
    return {};
  }
  std::vector<int32_t> ids;
  *is_cut = !SegmentIds(*segments, *text.tokenizer, &ids, budget);
  return ids;
}

}  // namespace

std::string Tokenize(const Json& body,
                     const TextModel& text,
                     int64_t max_model_len,
                     EncodeBudget budget,
                     std::optional<ApiError>* error) {
  budget.max_ids = limits::kMaxPromptIds;
  FieldReader reader(body, "", error);
  std::vector<int32_t> ids;
  bool is_cut = false;
  if (const std::string* prompt = reader.String("prompt")) {
    const bool add_special_tokens = reader.Bool("add_special_tokens").value_or(true);
    JobPrompt encoded = EncodePrompt(text, *prompt, add_special_tokens, budget);
    is_cut = encoded.is_cut;
    ids = std::move(encoded.ids);
  } else if (reader.Get("messages") != nullptr) {
    ids = ChatIds(reader, text, budget, &is_cut);
  } else {
    reader.Fail("prompt", "`prompt` or `messages` is missing.");
  }
  if (is_cut) {
    reader.Fail(reader.Get("prompt") != nullptr ? "prompt" : "messages",
                absl::StrCat("The text has more than ", limits::kMaxPromptIds, " tokens."));
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
