// The plain structs of one op's work, as the service hands them to the model and back: no proto, no
// wire format. Source: protocol specification sections 3 to 5. A step never decides anything: rows,
// pages, drafts and sampling parameters all come from the gateway's op.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace twinspark {

// Protocol section 5. Order of application and the keyed noise: kernels/sampling.
struct SamplingParams {
  float temperature = 0.0f;  // below 1e-5: argmax, no filters
  int32_t top_k = 0;         // 0 = off
  float top_p = 1.0f;
  float min_p = 0.0f;  // 0 = off
  float repetition_penalty = 1.0f;
  float presence_penalty = 0.0f;
  float frequency_penalty = 0.0f;
  uint64_t seed = 0;
  uint32_t choice = 0;     // index among `n`: third counter word of the noise
  int32_t min_tokens = 0;  // stop ids are masked until so many tokens are out
  std::vector<int32_t> stop_ids;
  std::vector<std::pair<int32_t, float>> logit_bias;
  std::vector<std::vector<int32_t>> bad_words;
  int32_t num_logprobs = -1;  // -1 = none, n = the chosen token and the top n
};

struct OpenSequence {
  int slot = 0;
  std::vector<int32_t> ids;         // prompt; after a recovery prompt + emitted
  int64_t num_prompt_ids = 0;       // penalties and min_tokens count from here
  std::vector<uint8_t> image_mask;  // empty, or one byte per id
  // Rows that replace embed.weight[id], f32 [positions][hidden]; positions ascending.
  std::vector<int64_t> embedding_positions;
  std::vector<float> embeddings;
  SamplingParams sampling;
  // -1 = none; n = of every prompt token after the first: its own and the top n.
  int32_t num_prompt_logprobs = -1;
  bool drafts_allowed = true;
};

struct PageMapping {
  int32_t logical_page = 0;
  int32_t physical_page = 0;
};

// Verify rows of one sequence: the anchor (the last emitted id, at first_position) and k drafts.
struct RoundSequence {
  int slot = 0;
  int64_t first_position = 0;     // ignored with after_previous
  bool after_previous = false;    // P = what the previous op left
  int num_drafts = 0;             // k
  bool kept_drafts = true;        // the model's own last drafts 1..k; else `drafts`
  std::vector<int32_t> drafts;    // explicit ids
  std::vector<int32_t> mask_ids;  // one per row (1 + k), -1 = none; empty = none
  bool draft_next = false;
};

// Prompt positions [begin, end) of one sequence. When `end` is the number of ids given at
// OpenSequence the last row samples the first token and, with draft_next, drafts are made.
struct PrefillRange {
  int slot = 0;
  int64_t begin = 0;
  int64_t end = 0;
  bool draft_next = false;
  int32_t mask_id = -1;  // for the sampled token
};

struct StepPlan {
  std::vector<RoundSequence> round;
  std::vector<PrefillRange> prefill;  // ShortPrefill, or one bulk chunk
  bool bulk = false;                  // row class of the row service
};

struct TokenLogprob {
  int32_t id = 0;
  float logprob = 0.0f;
};

// Of one emitted or prompt token, natural logs of the raw distribution.
struct TokenLogprobs {
  TokenLogprob token;
  int32_t rank = 0;               // 1 = most likely
  std::vector<TokenLogprob> top;  // as many as were asked for, most likely first
};

// Same order as the sequences of the plan: round first, then prefill.
struct SequenceResult {
  int slot = 0;
  int accepted = 0;                      // m: drafts 1..m agreed
  std::vector<int32_t> tokens;           // t_0..t_m; empty for a prefill that is not the last
  std::vector<int32_t> drafts;           // next d_1..d_block (empty unless draft_next)
  std::vector<float> draft_confidences;  // raw logits, one per draft
  int stop_index = -1;                   // first j with tokens[j] in stop_ids
  bool non_finite = false;               // a row had a NaN or an infinite logit
  std::vector<TokenLogprobs> logprobs;   // per emitted token (only when asked)
  // One per row whose next id is a prompt id, about that id (only when asked, and on rank 0).
  std::vector<TokenLogprobs> prompt_logprobs;
};

struct StepTimings {
  int64_t engram_wait_us = 0;
  int64_t collectives_us = 0;
  int64_t forward_us = 0;
  int64_t sample_us = 0;
  int64_t draft_us = 0;
};

struct StepResult {
  std::vector<SequenceResult> sequences;
  // xxhash64 over the final residual streams of every row, in plan order: equal on all ranks.
  uint64_t residual_digest = 0;
  // Over what all ranks computed or read alike on the way there (shared_trace.h): equal as well.
  uint64_t shared_digest = 0;
  StepTimings timings;
};

}  // namespace twinspark
