#include "gateway/scheduler/sampling_params.h"

#include <cmath>

#include "absl/strings/str_cat.h"

#include "common/limits.h"
#include "common/status_macros.h"

namespace twinspark::gateway {
namespace {

absl::Status CheckNumber(const char* field, double value, double low, double high) {
  if (std::isfinite(value) && value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, ", allowed are ", low, " to ", high));
}

absl::Status CheckCount(const char* field, size_t count, size_t max) {
  if (count <= max) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " has ", count, " entries, allowed are ", max));
}

absl::Status CheckToken(const char* field, int32_t id, int32_t vocab_size) {
  if (id >= 0 && (vocab_size == 0 || id < vocab_size)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": token id ", id, " is not in the vocabulary of ", vocab_size));
}

}  // namespace

absl::Status CheckSamplingParams(const SamplingParams& params, int32_t vocab_size) {
  RETURN_IF_ERROR(CheckNumber("temperature", params.temperature, 0, 100));
  RETURN_IF_ERROR(CheckNumber("top_p", params.top_p, 0, 1));
  RETURN_IF_ERROR(CheckNumber("min_p", params.min_p, 0, 1));
  RETURN_IF_ERROR(CheckNumber("repetition_penalty", params.repetition_penalty, 1e-6, 100));
  RETURN_IF_ERROR(CheckNumber("presence_penalty", params.presence_penalty, -100, 100));
  RETURN_IF_ERROR(CheckNumber("frequency_penalty", params.frequency_penalty, -100, 100));
  RETURN_IF_ERROR(CheckNumber("min_tokens", params.min_tokens, 0, limits::kMaxContext));
  RETURN_IF_ERROR(CheckNumber("logprobs", params.num_logprobs, -1, limits::kMaxTopLogprobs));
  RETURN_IF_ERROR(
      CheckNumber("prompt_logprobs", params.num_prompt_logprobs, -1, limits::kMaxTopLogprobs));
  // One more than clients may name: the end-of-sequence id.
  RETURN_IF_ERROR(
      CheckCount("stop_token_ids", params.stop_token_ids.size(), limits::kMaxStopIds + 1));
  for (const int32_t id : params.stop_token_ids) {
    RETURN_IF_ERROR(CheckToken("stop_token_ids", id, vocab_size));
  }
  RETURN_IF_ERROR(CheckCount("logit_bias", params.logit_bias.size(), limits::kMaxLogitBias));
  for (const auto& [id, bias] : params.logit_bias) {
    RETURN_IF_ERROR(CheckToken("logit_bias", id, vocab_size));
    RETURN_IF_ERROR(CheckNumber("logit_bias", bias, -1000, 1000));
  }
  RETURN_IF_ERROR(CheckCount("bad_words", params.bad_words.size(), 2 * limits::kMaxBadWords));
  for (const auto& word : params.bad_words) {
    if (word.empty()) return absl::InvalidArgumentError("bad_words has an empty word");
    RETURN_IF_ERROR(CheckCount("a bad word", word.size(), limits::kMaxBadWordIds));
    for (const int32_t id : word)
      RETURN_IF_ERROR(CheckToken("bad_words", id, vocab_size));
  }
  for (const int32_t id : params.allowed_token_ids) {
    RETURN_IF_ERROR(CheckToken("allowed_token_ids", id, vocab_size));
  }
  return absl::OkStatus();
}

}  // namespace twinspark::gateway
