// Passes over the logits of a row with vectors: what sampling does for every id of the vocabulary.
// Thread-safe; nothing is allocated.
#pragma once

#include <cstdint>
#include <limits>

#include "kernels/top_set.h"

namespace twinspark {

inline constexpr float kMaskedLogit = -std::numeric_limits<float>::infinity();

struct LogitScan {
  float largest = kMaskedLogit;  // NaN left out
  bool finite = true;            // all of them
  int64_t first = 0;             // a place shortly before the first of the largest
};
LogitScan ScanLogits(const float* logits, int64_t n);

// The first index from `from` on that holds a value; -1 if there is none.
int64_t FirstOf(const float* logits, int64_t n, float value, int64_t from);

// out[i] = logits[i] / by; out may be logits.
void DivideLogits(const float* logits, int64_t n, float by, float* out);

// Indices of all values of at least `least`, ascending; returns how many. indices: [n].
int64_t CollectAtLeast(const float* logits, int64_t n, float least, int32_t* indices);

// Offers all of them to `set` and leaves the best there.
void CollectBest(const float* logits, int64_t n, TopSet& set);

// sum_i exp(logits[i] - largest), off by less than kSumOfExpError of it; largest: of all of them.
inline constexpr double kSumOfExpError = 1e-10;
double SumOfExp(const float* logits, int64_t n, float largest);

}  // namespace twinspark
