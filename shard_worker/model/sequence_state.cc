// Penalty counts and the parameters of a draw (sequence_state.h).
#include "shard_worker/model/sequence_state.h"

#include <algorithm>

namespace twinspark {

void SequenceState::SetSampling(const SamplingParams& params) {
  sampling = params;
  biases.clear();
  for (const auto& [id, bias] : sampling.logit_bias)
    biases.push_back({id, bias});
  RebuildCounts();
}

void SequenceState::Append(int32_t id) {
  ids.push_back(id);
  if (UsesCounts()) Count(id, static_cast<int64_t>(ids.size()) > num_prompt_ids);
}

void SequenceState::TruncateIds(int64_t num_ids) {
  if (num_ids >= static_cast<int64_t>(ids.size())) return;
  ids.resize(static_cast<size_t>(num_ids));
  RebuildCounts();
}

void SequenceState::Count(int32_t id, bool generated) {
  const auto [it, is_new] = count_index.emplace(id, counts.size());
  if (is_new) counts.push_back({id, 0, 0});
  TokenCount& count = counts[it->second];
  (generated ? count.generated : count.in_prompt) += 1;
}

void SequenceState::RebuildCounts() {
  counts.clear();
  count_index.clear();
  if (!UsesCounts()) return;
  for (size_t i = 0; i < ids.size(); ++i)
    Count(ids[i], static_cast<int64_t>(i) >= num_prompt_ids);
}

ChoiceRow SequenceState::MakeChoiceRow(int64_t position,
                                       std::span<const int32_t> drafted,
                                       std::vector<int32_t>& banned) const {
  ChoiceRow row;
  const auto id_back = [&](size_t back) -> int32_t {  // 1 = the id just before the draw
    if (back <= drafted.size()) return drafted[drafted.size() - back];
    back -= drafted.size();
    return back <= ids.size() ? ids[ids.size() - back] : -1;
  };
  if (position - num_prompt_ids < sampling.min_tokens)
    banned.insert(banned.end(), sampling.stop_ids.begin(), sampling.stop_ids.end());
  for (const std::vector<int32_t>& word : sampling.bad_words) {
    if (word.empty()) continue;
    bool matches = true;
    for (size_t back = 1; back < word.size(); ++back)
      matches = matches && id_back(back) == word[word.size() - 1 - back];
    if (matches) banned.push_back(word.back());
  }
  row.banned_ids = banned.data();
  row.num_banned = static_cast<int>(banned.size());
  row.biases = biases.data();
  row.num_biases = static_cast<int>(biases.size());
  row.repetition_penalty = sampling.repetition_penalty;
  row.frequency_penalty = sampling.frequency_penalty;
  row.presence_penalty = sampling.presence_penalty;
  row.counts = counts.data();
  row.num_counts = static_cast<int>(counts.size());
  row.drafted = drafted.data();
  row.num_drafted = static_cast<int>(drafted.size());
  row.temperature = sampling.temperature;
  row.min_p = sampling.min_p;
  row.top_k = sampling.top_k;
  row.top_p = sampling.top_p;
  row.seed = sampling.seed;
  row.position = static_cast<uint32_t>(position);
  row.choice = sampling.choice;
  row.num_logprobs = sampling.num_logprobs;
  return row;
}

}  // namespace twinspark
