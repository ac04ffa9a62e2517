// POST /tokenize and /detokenize (chat.md 4.12 of the specification): text or messages to ids and
// back, without the engine.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "gateway/openai/api_error.h"
#include "gateway/text/ordered_json.h"
#include "gateway/text/text_model.h"

namespace twinspark::gateway {

// The body of the answer; empty when `error` is set. Of `budget` only the cancellation counts: a
// text may be longer than the context, up to limits::kMaxPromptIds tokens.
std::string Tokenize(const Json& body,
                     const TextModel& text,
                     int64_t max_model_len,
                     EncodeBudget budget,
                     std::optional<ApiError>* error);
std::string Detokenize(const Json& body,
                       const TextModel& text,
                       int32_t vocab_size,
                       std::optional<ApiError>* error);

}  // namespace twinspark::gateway
