// Log-probabilities of one emitted token (or of one prompt token), as a worker computed them and as
// the API shows them. Values are natural logs of the raw distribution, before sampling parameters.
#pragma once

#include <cstdint>
#include <vector>

namespace twinspark::gateway {

struct TokenLogprob {
  int32_t token_id = 0;
  float logprob = 0.0f;
};

struct TokenLogprobs {
  float logprob = 0.0f;           // of the token itself
  int32_t rank = 0;               // 1 = most likely; 0 = not reported
  std::vector<TokenLogprob> top;  // as many as were asked for, most likely first
};

}  // namespace twinspark::gateway
