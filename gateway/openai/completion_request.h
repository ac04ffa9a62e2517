// The body of POST /v1/completions (chat.md 4.9 of the specification): raw prompts, no chat format.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "gateway/openai/common_fields.h"
#include "gateway/openai/generation_job.h"

namespace twinspark::gateway {

struct CompletionRequest {
  CommonFields common;
  std::vector<JobPrompt> prompts;
  bool no_output = false;  // max_tokens 0 with echo
  bool echo_logprobs = false;
};

CompletionRequest ReadCompletionRequest(const Json& body,
                                        const TextModel& text,
                                        const FieldLimits& limits,
                                        const std::vector<std::string>& model_names,
                                        std::optional<ApiError>* error);

// The ids of `prompt` in parse mode, BOS in front unless it is there or not wanted.
std::vector<int32_t> EncodePrompt(const TextModel& text,
                                  const std::string& prompt,
                                  bool add_special_tokens);

}  // namespace twinspark::gateway
