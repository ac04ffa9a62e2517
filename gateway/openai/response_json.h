// Writes the JSON of responses and chunks (chat.md 4.6 to 4.9 of the specification). Text in, text
// out: no state of a request lives here. Compact JSON, one line.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "gateway/engine/generate_request.h"
#include "gateway/text/output_parser.h"
#include "gateway/text/tokenizer.h"

namespace twinspark::gateway {

// The fields that every chunk of a response, and the response, have in common.
struct ResponseHead {
  std::string id;
  int64_t created = 0;
  std::string model;
  bool is_chat = true;
  std::string fingerprint;  // "{build}-{weights}"
};

struct Usage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;
  int64_t cached_tokens = 0;
  int64_t reasoning_tokens = 0;
};
std::string UsageJson(const Usage& usage);

// One generated or echoed token of a response with log-probabilities.
struct TokenEntry {
  int32_t id = 0;
  std::optional<TokenLogprobs> logprobs;  // absent for the first prompt token
  OutputEvent::Kind kind = OutputEvent::Kind::kContent;
  int64_t text_offset = 0;  // in code points from the start of the choice's text
};

class LogprobWriter {
 public:
  LogprobWriter(const Tokenizer& tokenizer, bool as_token_ids)
      : tokenizer_(tokenizer), as_token_ids_(as_token_ids) {}

  // {"content":[...],"reasoning_content":[...]}; the second list only when it is not empty.
  std::string Chat(std::span<const TokenEntry> entries) const;
  // {"tokens":[...],"token_logprobs":[...],"top_logprobs":[...],"text_offset":[...]}
  std::string Text(std::span<const TokenEntry> entries) const;
  // [null,{"ID":{"logprob":x,"rank":r,"decoded_token":"..."}},...] of a prompt and its entries from
  // the second token on: the token itself and at most num_top of the most likely.
  std::string Prompt(std::span<const int32_t> prompt_ids,
                     std::span<const TokenLogprobs> logprobs,
                     int32_t num_top) const;

 private:
  std::string Name(int32_t id) const;
  void AppendEntry(int32_t id, float logprob, std::string* out) const;
  void AppendChatList(std::span<const TokenEntry> entries,
                      OutputEvent::Kind kind,
                      std::string* out) const;

  const Tokenizer& tokenizer_;
  const bool as_token_ids_;
};

// [1,2,3]
std::string IdsJson(std::span<const int32_t> ids);

// Everything of one choice that a response or chunk shows. `fields` values are JSON texts.
struct ChoiceJson {
  int index = 0;
  std::string body;             // delta, message (chat) or text (completions), as JSON
  std::string logprobs;         // empty: null
  std::string finish_reason;    // empty: null
  std::string stop_reason;      // JSON; written when there is a finish_reason
  std::string token_ids;        // empty: left out
  std::string prompt_logprobs;  // empty: left out
};
// {"index":0,"delta":...}; `body_key` is delta, message or text.
std::string ChoiceText(const ChoiceJson& choice, std::string_view body_key);

// A whole object: head, choices and members to add (each ",\"key\":value").
std::string ResponseText(const ResponseHead& head,
                         bool is_chunk,
                         std::string_view choices,
                         std::string_view more);

// "data: {json}\n\n"
std::string SseEvent(std::string_view json);
inline constexpr std::string_view kSseDone = "data: [DONE]\n\n";
inline constexpr std::string_view kSseKeepalive = ": keep-alive\n\n";

}  // namespace twinspark::gateway
