// What a slot holds beside the caches: ids, sampling parameters, block table, kept drafts. Token
// ids are the truth; Engram history, penalties and resumption follow from them. Step thread only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/container/flat_hash_map.h"

#include "kernels/sampling/choose_tokens.h"
#include "shard_worker/model/step.h"

namespace twinspark {

struct SequenceState {
  bool is_open = false;
  // Prompt and emitted tokens. Positions [0, committed) are in the caches; after sampling there is
  // one id more, the anchor at position `committed`.
  std::vector<int32_t> ids;
  int64_t num_given = 0;  // ids that came with OpenSequence: prefill ends there
  int64_t num_prompt_ids = 0;
  int64_t committed = 0;
  std::vector<uint8_t> image_mask;  // empty, or one byte per given id
  std::vector<int64_t> embedding_positions;
  std::vector<float> embeddings;
  bool drafts_allowed = true;
  int32_t num_prompt_logprobs = -1;
  std::vector<int32_t> pages;        // logical > physical, -1 = not mapped
  std::vector<int32_t> kept_drafts;  // made for position committed + 1 on

  SamplingParams sampling;
  std::vector<LogitBias> biases;
  std::vector<TokenCount> counts;  // only while penalties are on
  absl::flat_hash_map<int32_t, size_t> count_index;

  bool IsImage(int64_t position) const {
    return position < static_cast<int64_t>(image_mask.size()) &&
           image_mask[static_cast<size_t>(position)] != 0;
  }
  bool UsesCounts() const {
    return sampling.repetition_penalty != 1.0f || sampling.presence_penalty != 0.0f ||
           sampling.frequency_penalty != 0.0f;
  }

  void SetSampling(const SamplingParams& params);
  void Append(int32_t id);
  void TruncateIds(int64_t num_ids);
  // The parameters of the draw of the token at `position`, with `drafted` ids assumed between the
  // last id and it. `banned` receives the ids that may not come here (stop ids before min_tokens,
  // ends of bad words); both spans are borrowed by the result.
  ChoiceRow MakeChoiceRow(int64_t position,
                          std::span<const int32_t> drafted,
                          std::vector<int32_t>& banned) const;

 private:
  void Count(int32_t id, bool generated);
  void RebuildCounts();
};

}  // namespace twinspark
