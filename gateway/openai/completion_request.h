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
  int32_t num_prompt_logprobs = -1;  // shown as `prompt_logprobs`; the engine may be asked for more
};

// Reading ends at a prompt that is over `budget`; it is the last one then, and marked as cut.
CompletionRequest ReadCompletionRequest(const Json& body,
                                        const TextModel& text,
                                        const FieldLimits& limits,
                                        const std::vector<std::string>& model_names,
                                        const EncodeBudget& budget,
                                        std::optional<ApiError>* error);

// `prompt` in parse mode, BOS in front unless it is there or not wanted; its text as echo.
JobPrompt EncodePrompt(const TextModel& text,
                       const std::string& prompt,
                       bool add_special_tokens,
                       const EncodeBudget& budget);

}  // namespace twinspark::gateway
