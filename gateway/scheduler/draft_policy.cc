#include "gateway/scheduler/draft_policy.h"

#include <algorithm>

namespace twinspark::gateway {

int MaxDraftsOfRound(const Sequence& sequence, int growth) {
  const int remaining = sequence.num_remaining() - growth;
  return std::max(0, std::min({sequence.num_kept_drafts, sequence.max_drafts, remaining - 1}));
}

bool DraftsWanted(const Sequence& sequence, int remaining) {
  return sequence.max_drafts > 0 && remaining >= 2;
}

std::vector<int> AllocateDrafts(std::span<const int> wanted, int max_rows) {
  std::vector<int> granted(wanted.size(), kNotThisRound);
  const size_t served = std::min(wanted.size(), static_cast<size_t>(max_rows));
  if (served == 0) return granted;

  const std::span<const int> turn = wanted.first(served);
  const auto rows_at = [&](int cap) {
    int rows = 0;
    for (const int k : turn)
      rows += 1 + std::min(k, cap);
    return rows;
  };
  int cap = *std::max_element(turn.begin(), turn.end());
  while (cap > 0 && rows_at(cap) > max_rows)
    --cap;

  int spare = max_rows - rows_at(cap);
  for (size_t i = 0; i < served; ++i) {
    granted[i] = std::min(turn[i], cap);
    if (turn[i] > cap && spare > 0) {
      ++granted[i];
      --spare;
    }
  }
  return granted;
}

}  // namespace twinspark::gateway
