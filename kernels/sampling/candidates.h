// Which ids of a row take part in the draw: min_p, then top_k, then top_p. Internal to sampling.
#pragma once

#include <cstdint>

#include "kernels/arena.h"
#include "kernels/sampling/choose_tokens.h"

namespace twinspark {

struct Candidate {
  float logit;
  int32_t id;
};
// Most likely first, equal ones by id.
inline bool Better(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// Scratch of one thread.
struct ChoiceScratch {
  float* logits = nullptr;          // [vocab]
  Candidate* candidates = nullptr;  // [vocab]
  Candidate* sorted = nullptr;      // [vocab]
};
ChoiceScratch TakeChoiceScratch(Arena& arena, int64_t vocab);
int64_t ChoiceScratchBytes(int64_t vocab);

// logits[i] is that of ids[i], or of id i where ids is null (then some may be masked).
struct Candidates {
  const float* logits = nullptr;
  const int32_t* ids = nullptr;
  int64_t count = 0;
  float largest = 0;  // of the logits

  int32_t id(int64_t i) const { return ids == nullptr ? static_cast<int32_t>(i) : ids[i]; }
};

// logits: already divided by the temperature, the largest of them `largest`; may be s.logits, which
// may be overwritten. The result borrows from both.
Candidates FilterCandidates(
    const ChoiceRow& row, const float* logits, int64_t vocab, float largest, ChoiceScratch& s);

}  // namespace twinspark
