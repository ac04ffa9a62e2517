// How the next token of one sequence is chosen; fixed when the sequence opens. Filled by
// gateway/openai from a request, carried unchanged through scheduler and engine to the workers.
// Ranges are those of common/sampling_bounds.h, for the API, here and in the workers; the order in
// which a worker applies the fields is dspark.md 2.3 and chat.md 4.3 of the specification.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace twinspark::gateway {

struct SamplingParams {
  float temperature = 1.0f;  // below 1e-5: greedy, no filters
  float top_p = 1.0f;        // (0, 1]
  float min_p = 0.0f;        // 0 = off
  int32_t top_k = 0;         // 0 = off
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  uint64_t seed = 0;  // always set: a request without one gets a drawn seed before it is submitted
  uint32_t choice = 0;     // index among the n choices of a request; part of the noise's counter
  int32_t min_tokens = 0;  // stop ids are masked until so many tokens have been emitted
  std::vector<int32_t> stop_token_ids;  // EOS included unless ignore_eos
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<std::vector<int32_t>> bad_words;  // token sequences that must not be completed
  std::vector<int32_t> allowed_token_ids;       // empty = all
  int32_t num_logprobs = -1;                    // -1 none, 0 the chosen token's only, n: and n best
  int32_t num_prompt_logprobs = -1;             // same, for the prompt's tokens
};

struct SamplingProblem {
  std::string field;  // as clients name it
  std::string message;
};

// The first field that a worker would refuse, or that can leave no token to draw. A refused op ends
// the epoch for everybody, so this is asked before a request is queued. `vocab_size` 0: not known.
std::optional<SamplingProblem> FindSamplingProblem(const SamplingParams& params,
                                                   int32_t vocab_size);

// The same as INVALID_ARGUMENT.
absl::Status CheckSamplingParams(const SamplingParams& params, int32_t vocab_size);

}  // namespace twinspark::gateway
