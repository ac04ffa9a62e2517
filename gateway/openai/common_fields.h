// The sampling and output fields that chat and text completions share (chat.md 4.3 of the
// specification): read, checked, and turned into SamplingParams and output options.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "gateway/engine/generate_request.h"
#include "gateway/openai/field_reader.h"
#include "gateway/text/text_model.h"

namespace twinspark::gateway {

// What a server lets a request ask for; part of OpenAiOptions.
struct FieldLimits {
  int32_t vocab_size = 0;
  int32_t max_context = 0;  // prompt + output; 0: no model yet
  double default_temperature = 1.0;
  double default_top_p = 0.95;
};

struct CommonFields {
  SamplingParams sampling;
  std::optional<int32_t> max_tokens;
  int32_t num_choices = 1;
  bool stream = false;
  bool include_usage = false;
  bool continuous_usage = false;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;  // of the request; EOS is only in sampling.stop_token_ids
  bool include_stop = false;
  bool skip_special_tokens = true;
  bool return_token_ids = false;
  bool return_tokens_as_token_ids = false;
  std::string request_id;  // empty: none given
};

// 1..128 characters of A-Z, a-z, 0-9, '.', '_', '-'.
bool IsRequestId(std::string_view id);

// Reads them from a request. `reader` keeps the error.
CommonFields ReadCommonFields(FieldReader& reader,
                              const TextModel& text,
                              const FieldLimits& limits);

// The tokens that may be generated, or the error of chat.md 4.4: prompt + requested must fit.
// `param` names the field that holds the prompt. `is_cut`: the prompt has at least `num_prompt`
// tokens, and was not encoded to its end because so many can never fit.
std::optional<int32_t> TokensThatFit(int64_t max_model_len,
                                     int64_t num_prompt,
                                     bool is_cut,
                                     std::optional<int32_t> requested,
                                     const std::string& param,
                                     std::optional<ApiError>* error);

}  // namespace twinspark::gateway
