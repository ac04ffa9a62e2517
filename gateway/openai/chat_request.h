// The body of POST /v1/chat/completions (and of /tokenize with messages) to what the prompt encoder
// and the engine take: layer A of the specification (chat.md 2.10, 4.3, 4.4).
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "gateway/openai/common_fields.h"
#include "gateway/text/chat_template.h"

namespace twinspark::gateway {

struct ChatRequest {
  CommonFields common;
  std::vector<ChatMessage> messages;
  ChatOptions options;
  bool has_rendered_tools = false;
  bool wants_format = false;  // a response format is in the prompt, and not enforced
  bool include_reasoning = true;
  bool echo = false;
  bool return_prompt_text = false;
  std::string continued_content;  // of the message that is continued, for echo
  bool continues_reasoning = false;
};

// Checks that `model` is one of ours; absent means the first. 404 otherwise.
void CheckModel(FieldReader& reader, const std::vector<std::string>& model_names);

// Reads a whole chat request; on failure `error` says what and where.
ChatRequest ReadChatRequest(const Json& body,
                            const TextModel& text,
                            const FieldLimits& limits,
                            const std::vector<std::string>& model_names,
                            std::optional<ApiError>* error);

// Only what decides the prompt: messages, tools, thinking, continuation (/tokenize).
void ReadChatPrompt(FieldReader& reader, ChatRequest* request);

}  // namespace twinspark::gateway
