// See first_chat.h.
#include "deploy/local_cluster/first_chat.h"

#include <boost/json.hpp>

#include "absl/strings/str_cat.h"

#include "common/clock.h"
#include "common/status_macros.h"
#include "deploy/local_cluster/http_client.h"

namespace twinspark {
namespace {

constexpr int kChatTimeoutMs = 60000;
constexpr int kModelsTimeoutMs = 5000;

// Takes one `chat.completion.chunk`; false when it is none.
bool TakeChunk(std::string_view payload, ChatAnswer& answer, std::string& new_text) {
  boost::system::error_code error;
  const boost::json::value chunk = boost::json::parse({payload.data(), payload.size()}, error);
  if (error) return false;
  if (const auto* usage = chunk.find_pointer("/usage/completion_tokens", error)) {
    answer.completion_tokens = usage->to_number<int>();
  }
  if (const auto* content = chunk.find_pointer("/choices/0/delta/content", error);
      content != nullptr && content->is_string()) {
    new_text = content->as_string().c_str();
    answer.text += new_text;
  }
  if (const auto* reason = chunk.find_pointer("/choices/0/finish_reason", error);
      reason != nullptr && reason->is_string()) {
    answer.finish_reason = reason->as_string().c_str();
  }
  return true;
}

}  // namespace

absl::StatusOr<std::string> ServedModel(const std::string& base_url) {
  ASSIGN_OR_RETURN(const HttpReply reply, HttpGet(base_url + "/v1/models", kModelsTimeoutMs));
  boost::system::error_code error;
  const boost::json::value models = boost::json::parse(reply.body, error);
  const boost::json::value* id = error ? nullptr : models.find_pointer("/data/0/id", error);
  if (reply.status != 200 || id == nullptr || !id->is_string()) {
    return absl::UnavailableError(
        absl::StrCat(base_url, "/v1/models: HTTP ", reply.status, ": ", reply.body.substr(0, 500)));
  }
  return std::string(id->as_string().c_str());
}

absl::StatusOr<ChatAnswer> AskChat(const std::string& base_url,
                                   const std::string& model,
                                   const std::string& question,
                                   int max_tokens,
                                   const std::function<void(std::string_view)>& on_text) {
  const boost::json::object request = {
      {"model", model},
      {"messages", {boost::json::object{{"role", "user"}, {"content", question}}}},
      {"temperature", 0},
      {"max_tokens", max_tokens},
      {"stream", true},
      {"stream_options", {{"include_usage", true}}},
      {"chat_template_kwargs", {{"enable_thinking", false}}},
  };
  const SteadyClock clock;
  const int64_t start_us = clock.NowUs();
  int64_t first_us = 0;
  ChatAnswer answer;
  ASSIGN_OR_RETURN(
      const HttpReply reply,
      HttpPostEvents(base_url + "/v1/chat/completions", boost::json::serialize(request),
                     kChatTimeoutMs, [&](std::string_view payload) {
                       std::string new_text;
                       if (!TakeChunk(payload, answer, new_text) || new_text.empty()) return;
                       if (first_us == 0) first_us = clock.NowUs();
                       on_text(new_text);
                     }));
  if (reply.status != 200)
    return absl::UnavailableError(
        absl::StrCat("HTTP ", reply.status, ": ", reply.body.substr(0, 500)));
  if (answer.finish_reason.empty())
    return absl::DataLossError(absl::StrCat("the stream ended early: ", reply.body.substr(0, 500)));
  answer.ttft_ms = static_cast<double>(first_us - start_us) / 1e3;
  // Not from the first token to the last: a short answer comes in one burst.
  answer.tokens_per_second =
      answer.completion_tokens / (static_cast<double>(clock.NowUs() - start_us) / 1e6);
  return answer;
}

}  // namespace twinspark
