// From logits to tokens: masks, biases, penalties, temperature, filters and the keyed draw, in the
// order of chat specification 4.3 with the definitions of dspark specification 2.3:
//   allowed mask, banned ids; logit bias; repetition, frequency, presence penalty; grammar mask;
//   temperature < 1e-5: argmax, lowest id on ties; else l / T, min_p, top_k, top_p, argmax(l +
//   noise).
// Rows are independent, and every rank that holds the same logits chooses the same tokens. The
// model calls it once per step for all rows, and once per draft position for the draft chain.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/launch.h"
#include "kernels/tensor_view.h"

namespace twinspark {

struct LogitBias {
  int32_t id = 0;
  float bias = 0;
};

// How often an id occurred; ids in any order, each once.
struct TokenCount {
  int32_t id = 0;
  int32_t in_prompt = 0;
  int32_t generated = 0;
};

// One row. Pointers borrow and may be null where the count is 0. Bit masks: id v is bit v % 8 of
// byte v / 8, 1 = allowed.
struct ChoiceRow {
  const uint8_t* allowed_mask = nullptr;
  const int32_t* banned_ids = nullptr;  // stop ids before min_tokens, ends of bad words
  int num_banned = 0;
  const LogitBias* biases = nullptr;
  int num_biases = 0;
  float repetition_penalty = 1;  // over prompt and generated: l > 0 ? l / r : l * r
  float frequency_penalty = 0;   // l -= f * times generated
  float presence_penalty = 0;    // l -= p if generated
  const TokenCount* counts = nullptr;
  int num_counts = 0;
  const int32_t* drafted = nullptr;  // drafts before this row, counted as generated on top
  int num_drafted = 0;
  const uint8_t* grammar_mask = nullptr;

  float temperature = 0;
  float min_p = 0;  // 0 = off
  int top_k = 0;    // <= 0 = off
  float top_p = 1;  // >= 1 = off
  uint64_t seed = 0;
  uint32_t position = 0;  // of the token being drawn
  uint32_t choice = 0;

  // >= 0: nothing is drawn, this is the token (a prompt's), and its log-probability is asked.
  int32_t given_token = -1;
  int num_logprobs = -1;  // -1 = none; n = the chosen token and the n most likely
};

struct ChooseTokensParams {
  ConstTensorView logits;           // [num_rows, vocab], kF32, raw
  const ChoiceRow* rows = nullptr;  // [num_rows]
  int32_t* tokens = nullptr;      // [num_rows]; -1 when every id is masked or the row is not finite
  uint8_t* non_finite = nullptr;  // [num_rows]: 1 = a raw logit is NaN or infinite; may be null
  // Log-softmax of the raw logits: entry 0 the chosen token, then the most likely ones in order
  // (ties to the lower id). [num_rows, stride]; null when no row asks.
  int32_t* logprob_ids = nullptr;
  float* logprobs = nullptr;
  int64_t logprob_stride = 0;  // >= 1 + largest num_logprobs
  // [num_rows]: place of the chosen token in that order, 1 = most likely, 0 = there is no token;
  // null when no row asks for log-probabilities.
  int32_t* logprob_ranks = nullptr;
};

// Lowest id of the largest logit of each row; NaN never wins. The greedy path without extras.
struct ArgmaxParams {
  ConstTensorView logits;     // [num_rows, vocab], kF32
  int32_t* tokens = nullptr;  // [num_rows]; -1 when nothing is above -inf
};

// out[t, first_col + j] = part[t, j]: puts the vocabulary slices of the ranks side by side after
// the all-gather ([rank][rows][slice] -> [rows][vocab]).
struct JoinSlicesParams {
  ConstTensorView parts;  // [num_ranks * num_rows, slice], rank-major, kF32
  int num_ranks = 1;
  TensorView out;  // [num_rows, num_ranks * slice], kF32
};

void ChooseTokensCpu(const ChooseTokensParams& params, const Launch& launch);
void ArgmaxCpu(const ArgmaxParams& params, const Launch& launch);
void JoinSlicesCpu(const JoinSlicesParams& params, const Launch& launch);

// Ids that masks and filters of `row` leave for the draw, ascending; for tests and golden data.
std::vector<int32_t> KeptTokens(const float* logits, int64_t vocab, const ChoiceRow& row);

int64_t ChooseTokensScratchBytesCpu(int64_t vocab, int num_threads);

}  // namespace twinspark
