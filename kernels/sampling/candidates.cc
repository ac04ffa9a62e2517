// Filters of candidates. Sorting for top_p is a stable radix sort over ids in ascending order, so
// equal logits keep the lower id first; terms that cannot change an f64 sum of at least 1 are left
// out.
#include "kernels/sampling/candidates.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>

#include "kernels/sampling/scan_logits.h"
#include "kernels/top_set.h"

namespace twinspark {
namespace {

// exp(-37) < 2^-53: added to a sum of at least 1 it changes nothing.
constexpr float kNegligible = 37.0f;

// Key that ascends as the logit descends; equal logits (also -0 and 0) have equal keys.
uint32_t DescendingKey(float logit) {
  const uint32_t bits = std::bit_cast<uint32_t>(logit + 0.0f);
  return (bits & 0x80000000u) != 0 ? bits : ~bits & 0x7fffffffu;
}

// Stable: candidates of equal logit stay in their order. Result in `from`.
void RadixSortDescending(Candidate*& from, Candidate*& to, int64_t count) {
  constexpr int kBits = 11, kPasses = 3;
  constexpr uint32_t kBuckets = 1u << kBits;
  for (int pass = 0; pass < kPasses; ++pass) {
    uint32_t starts[kBuckets + 1] = {};
    const int shift = pass * kBits;
    for (int64_t i = 0; i < count; ++i) {
      ++starts[((DescendingKey(from[i].logit) >> shift) & (kBuckets - 1)) + 1];
    }
    for (uint32_t b = 1; b <= kBuckets; ++b)
      starts[b] += starts[b - 1];
    for (int64_t i = 0; i < count; ++i) {
      to[starts[(DescendingKey(from[i].logit) >> shift) & (kBuckets - 1)]++] = from[i];
    }
    std::swap(from, to);
  }
}

// Candidates arrive in ascending id.
void SortDescending(Candidate*& from, Candidate*& to, int64_t count) {
  constexpr int64_t kFew = 256;  // below, clearing and adding up buckets takes longer
  if (count <= kFew) {
    std::sort(from, from + count, Better);
  } else {
    RadixSortDescending(from, to, count);
  }
}

double Probability(float logit, float largest) {
  return std::exp(static_cast<double>(logit) - static_cast<double>(largest));
}

// The definition: length of the shortest prefix of s.candidates, in descending order, whose
// probability reaches top_p. Candidates arrive in ascending id and leave sorted.
int64_t KeepTopP(ChoiceScratch& s, int64_t count, float largest, float top_p) {
  const auto end = std::remove_if(s.candidates, s.candidates + count, [&](const Candidate& c) {
    return static_cast<double>(largest) - static_cast<double>(c.logit) > kNegligible;
  });
  count = end - s.candidates;
  SortDescending(s.candidates, s.sorted, count);
  // The sort is done with `sorted`, so the probabilities lie there.
  static_assert(sizeof(Candidate) == sizeof(double));
  const auto probability = [&](int64_t i) {
    double p;
    std::memcpy(&p, s.sorted + i, sizeof(p));
    return p;
  };
  double total = 0;
  for (int64_t i = 0; i < count; ++i) {
    const double p = Probability(s.candidates[i].logit, largest);
    std::memcpy(s.sorted + i, &p, sizeof(p));
    total += p;
  }
  const double target = static_cast<double>(top_p) * total;
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += probability(i);
    if (sum >= target) return i + 1;
  }
  return count;
}

// s.candidates[0 .. in.count) in the order of `in`, which ascends, without the masked ones.
int64_t ListCandidates(const Candidates& in, ChoiceScratch& s) {
  int64_t count = 0;
  for (int64_t i = 0; i < in.count; ++i) {
    if (in.logits[i] > kMaskedLogit) s.candidates[count++] = {in.logits[i], in.id(i)};
  }
  return count;
}

// The same number without sorting everything: a total that is nearly right says below which logit
// nobody can be needed; those above are few, and the sums along them are the ones of the
// definition. Returns -1, with nothing changed but the lists of scratch, where the total would have
// to be known better. in.ids must not lie in s.candidates or s.sorted.
int64_t KeepTopPOfFew(const Candidates& in, float top_p, ChoiceScratch& s) {
  constexpr double kLeastRest = 1e-6;  // of probability; nearer to 1 the sums hardly differ
  const double rest = 1.0 - static_cast<double>(top_p);
  if (rest < kLeastRest) return -1;
  const double total = SumOfExp(in.logits, in.count, in.largest);
  // All below together have at most half of the rest.
  const double least = std::log(0.5 * rest * total / static_cast<double>(in.count));
  const float bound = in.largest + std::max(static_cast<float>(least), -kNegligible);
  int32_t* const found = reinterpret_cast<int32_t*>(s.sorted);
  const int64_t count = CollectAtLeast(in.logits, in.count, bound, found);
  for (int64_t i = 0; i < count; ++i)
    s.candidates[i] = {in.logits[found[i]], in.id(found[i])};
  SortDescending(s.candidates, s.sorted, count);
  const double target = static_cast<double>(top_p) * total;
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += Probability(s.candidates[i].logit, in.largest);
    if (sum >= target * (1 + 2 * kSumOfExpError)) return i + 1;
    if (sum >= target * (1 - 2 * kSumOfExpError)) return -1;
  }
  return -1;
}

// s.candidates[0 .. count) as logits and ids; overwrites s.logits and s.sorted.
Candidates FromList(ChoiceScratch& s, int64_t count, float largest) {
  int32_t* const ids = reinterpret_cast<int32_t*>(s.sorted);
  for (int64_t i = 0; i < count; ++i) {
    s.logits[i] = s.candidates[i].logit;
    ids[i] = s.candidates[i].id;
  }
  return {s.logits, ids, count, largest};
}

// The logits of ascending ids.
Candidates FromIds(const float* logits, const int32_t* ids, int64_t count, ChoiceScratch& s) {
  float largest = kMaskedLogit;
  for (int64_t i = 0; i < count; ++i) {
    s.logits[i] = logits[ids[i]];  // never behind the place it comes from
    largest = std::max(largest, s.logits[i]);
  }
  return {s.logits, ids, count, largest};
}

// Those of at least `least`.
Candidates KeepAtLeast(const Candidates& in, float least, ChoiceScratch& s) {
  int32_t* const ids = reinterpret_cast<int32_t*>(s.sorted);
  if (in.ids == nullptr) {
    return FromIds(in.logits, ids, CollectAtLeast(in.logits, in.count, least, ids), s);
  }
  int64_t count = 0;  // of a list that lies in scratch already
  for (int64_t i = 0; i < in.count; ++i) {
    if (!(in.logits[i] >= least)) continue;
    s.logits[count] = in.logits[i];
    ids[count++] = in.ids[i];
  }
  return {s.logits, ids, count, in.largest};
}

// The top_k best of `in`, whose ids are those of the vocabulary.
Candidates KeepTopK(const Candidates& in, int64_t top_k, ChoiceScratch& s) {
  if (TopSet::Room(top_k) <= in.count) {
    int32_t* const memory = reinterpret_cast<int32_t*>(s.sorted);
    TopSet set = {.keys = memory, .indices = memory + TopSet::Room(top_k), .capacity = top_k};
    CollectBest(in.logits, in.count, set);
    return FromIds(in.logits, set.indices, set.count, s);
  }
  int64_t count = ListCandidates(in, s);
  if (top_k < count) {
    std::nth_element(s.candidates, s.candidates + top_k - 1, s.candidates + count, Better);
    count = top_k;
    std::sort(s.candidates, s.candidates + count,
              [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
  }
  return FromList(s, count, in.largest);
}

}  // namespace

ChoiceScratch TakeChoiceScratch(Arena& arena, int64_t vocab) {
  ChoiceScratch s;
  s.logits = arena.Take<float>(vocab);
  s.candidates = arena.Take<Candidate>(vocab);
  s.sorted = arena.Take<Candidate>(vocab);
  return s;
}

int64_t ChoiceScratchBytes(int64_t vocab) {
  return vocab * static_cast<int64_t>(sizeof(float) + 2 * sizeof(Candidate));
}

Candidates FilterCandidates(
    const ChoiceRow& row, const float* logits, int64_t vocab, float largest, ChoiceScratch& s) {
  if (largest == kMaskedLogit) return {logits, nullptr, 0, largest};
  Candidates kept = {logits, nullptr, vocab, largest};
  if (row.top_k > 0 && row.top_k < vocab) kept = KeepTopK(kept, row.top_k, s);
  if (row.min_p > 0) kept = KeepAtLeast(kept, largest + std::log(row.min_p), s);
  if (row.top_p >= 1) return kept;
  int64_t count = kept.ids == nullptr ? KeepTopPOfFew(kept, row.top_p, s) : -1;
  if (count < 0) count = KeepTopP(s, ListCandidates(kept, s), largest, row.top_p);
  return FromList(s, count, largest);
}

}  // namespace twinspark
