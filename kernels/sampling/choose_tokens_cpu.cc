// Sampling on the CPU, one thread per row. Greedy rows without extras read the logits once; others
// work on a copy. Noise words of a draw are computed many at a time. Sorting for top_p is a stable
// radix sort over ids in ascending order, so equal logits keep the lower id first; terms that
// cannot change an f64 sum of at least 1 are left out.
#include "kernels/sampling/choose_tokens.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/sampling/choose_tokens_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/parallel_rows.h"
#include "kernels/sampling/keyed_noise.h"
#include "kernels/vec-inl.h"

#ifndef TWINSPARK_KERNELS_SAMPLING_SCAN_
#define TWINSPARK_KERNELS_SAMPLING_SCAN_
namespace twinspark {
namespace {

constexpr float kMasked = -std::numeric_limits<float>::infinity();
constexpr int64_t kNoiseBlock = 64;  // candidates whose noise is computed together

struct LogitScan {
  float largest = kMasked;
  bool finite = true;
};

}  // namespace
}  // namespace twinspark
#endif  // TWINSPARK_KERNELS_SAMPLING_SCAN_

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

// One pass: the largest value, NaN left out, and whether all are finite. Four chains each, as one
// would be a chain of latencies.
LogitScan ScanLogits(const float* logits, int64_t n) {
  constexpr int kChains = 4;
  const DF d;
  const hn::RebindToUnsigned<DF> du;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  VF largest[kChains];
  hn::Vec<decltype(du)> magnitude[kChains];  // of infinities and NaN: not below infinity
  TWINSPARK_UNROLL
  for (int c = 0; c < kChains; ++c) {
    largest[c] = hn::Set(d, kMasked);
    magnitude[c] = hn::Zero(du);
  }
  const auto add = [&](VF x, VF& best, hn::Vec<decltype(du)>& most) HWY_ATTR {
    best = hn::IfThenElse(hn::Gt(x, best), x, best);
    most = hn::Max(most, hn::And(hn::BitCast(du, x), hn::Set(du, 0x7fffffffu)));
  };
  int64_t i = 0;
  for (; i + kChains * lanes <= n; i += kChains * lanes) {
    TWINSPARK_UNROLL
    for (int c = 0; c < kChains; ++c)
      add(hn::LoadU(d, logits + i + c * lanes), largest[c], magnitude[c]);
  }
  for (; i + lanes <= n; i += lanes)
    add(hn::LoadU(d, logits + i), largest[0], magnitude[0]);
  const VF best = hn::Max(hn::Max(largest[0], largest[1]), hn::Max(largest[2], largest[3]));
  const auto most =
      hn::Max(hn::Max(magnitude[0], magnitude[1]), hn::Max(magnitude[2], magnitude[3]));
  LogitScan scan = {hn::GetLane(hn::MaxOfLanes(d, best)),
                    hn::AllTrue(du, hn::Lt(most, hn::Set(du, 0x7f800000u)))};
  for (; i < n; ++i) {
    scan.largest = logits[i] > scan.largest ? logits[i] : scan.largest;
    scan.finite = scan.finite && std::isfinite(logits[i]);
  }
  return scan;
}

// The first index of a value; -1 if there is none.
int64_t FirstOf(const float* logits, int64_t n, float value) {
  const DF d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const VF wanted = hn::Set(d, value);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    const intptr_t found = hn::FindFirstTrue(d, hn::Eq(hn::LoadU(d, logits + i), wanted));
    if (found >= 0) return i + found;
  }
  for (; i < n; ++i) {
    if (logits[i] == value) return i;
  }
  return -1;
}

// words[i] = NoiseWord(key, tokens[i]); both arrays have kNoiseBlock elements. Philox on numbers of
// 64 bits: only lower halves take part in products, so upper halves may hold anything.
void NoiseWords(const NoiseKey& key, const uint32_t* tokens, int64_t count, uint32_t* words) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t i = 0; i < count; ++i)
    words[i] = NoiseWord(key, tokens[i]);
#else
  constexpr int kNumRounds = 10;
  const hn::ScalableTag<uint64_t> d;
  const hn::Repartition<uint32_t, decltype(d)> d32;
  const hn::Rebind<uint32_t, decltype(d)> d_half;
  const auto m0 = hn::BitCast(d32, hn::Set(d, kPhiloxMultiplier0));
  const auto m1 = hn::BitCast(d32, hn::Set(d, kPhiloxMultiplier1));
  for (int64_t i = 0; i < count; i += static_cast<int64_t>(hn::Lanes(d))) {
    auto c0 = hn::Set(d, uint64_t{key.position}), c2 = hn::Set(d, uint64_t{key.choice});
    auto c1 = hn::PromoteTo(d, hn::LoadU(d_half, tokens + i)), c3 = hn::Zero(d);
    uint32_t k0 = static_cast<uint32_t>(key.seed), k1 = static_cast<uint32_t>(key.seed >> 32);
    for (int round = 0; round < kNumRounds; ++round) {
      const auto p0 = hn::MulEven(hn::BitCast(d32, c0), m0);
      const auto p1 = hn::MulEven(hn::BitCast(d32, c2), m1);
      c0 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p1), c1), hn::Set(d, uint64_t{k0}));
      c2 = hn::Xor(hn::Xor(hn::ShiftRight<32>(p0), c3), hn::Set(d, uint64_t{k1}));
      c1 = p1;
      c3 = p0;
      k0 += kPhiloxWeyl0;
      k1 += kPhiloxWeyl1;
    }
    hn::StoreU(hn::TruncateTo(d_half, c0), d_half, words + i);
  }
#endif
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
namespace {

HWY_EXPORT(ScanLogits);
HWY_EXPORT(FirstOf);
HWY_EXPORT(NoiseWords);

constexpr float kGreedyBelow = 1e-5f;
// A tiny repetition penalty would make a logit infinite; this stays finite when divided by any
// temperature that is not greedy.
constexpr float kLargestPenalized = 1e30f;

struct Candidate {
  float logit;
  int32_t id;
};
bool Better(const Candidate& a, const Candidate& b) {
  return a.logit != b.logit ? a.logit > b.logit : a.id < b.id;
}

// Scratch of one thread.
struct ChoiceScratch {
  float* logits = nullptr;          // [vocab]
  Candidate* candidates = nullptr;  // [vocab]
  Candidate* sorted = nullptr;      // [vocab]
};

int32_t ArgmaxRow(const float* logits, int64_t vocab, float largest) {
  if (largest == kMasked) return -1;
  return static_cast<int32_t>(HWY_DYNAMIC_DISPATCH(FirstOf)(logits, vocab, largest));
}
int32_t ArgmaxRow(const float* logits, int64_t vocab) {
  return ArgmaxRow(logits, vocab, HWY_DYNAMIC_DISPATCH(ScanLogits)(logits, vocab).largest);
}

void ApplyMask(const uint8_t* mask, int64_t vocab, float* logits) {
  if (mask == nullptr) return;
  for (int64_t v = 0; v < vocab; ++v) {
    if (((mask[v / 8] >> (v % 8)) & 1) == 0) logits[v] = kMasked;
  }
}

bool InVocab(int32_t id, int64_t vocab) {
  return id >= 0 && id < vocab;
}

void Penalize(const ChoiceRow& row, int32_t id, int64_t generated, int64_t vocab, float* logits) {
  if (!InVocab(id, vocab)) return;
  float& l = logits[id];
  l = l > 0 ? l / row.repetition_penalty : l * row.repetition_penalty;
  l = std::min(l, kLargestPenalized);
  l -= row.frequency_penalty * static_cast<float>(generated);
  if (generated > 0) l -= row.presence_penalty;
}

void ApplyPenalties(const ChoiceRow& row, int64_t vocab, float* logits) {
  if (row.repetition_penalty == 1 && row.frequency_penalty == 0 && row.presence_penalty == 0) {
    return;
  }
  constexpr int kMaxDrafted = 64;
  CHECK(row.num_drafted <= kMaxDrafted) << row.num_drafted;
  bool done[kMaxDrafted] = {};
  const auto drafted_times = [&](int32_t id) {
    int64_t times = 0;
    for (int i = 0; i < row.num_drafted; ++i) {
      if (row.drafted[i] != id) continue;
      ++times;
      done[i] = true;
    }
    return times;
  };
  for (int i = 0; i < row.num_counts; ++i) {
    const TokenCount& count = row.counts[i];
    const int64_t generated = count.generated + drafted_times(count.id);
    if (count.in_prompt > 0 || generated > 0) Penalize(row, count.id, generated, vocab, logits);
  }
  for (int i = 0; i < row.num_drafted; ++i) {
    if (done[i]) continue;
    Penalize(row, row.drafted[i], drafted_times(row.drafted[i]), vocab, logits);
  }
}

bool IsPlain(const ChoiceRow& row) {
  return row.allowed_mask == nullptr && row.grammar_mask == nullptr && row.num_banned == 0 &&
         row.num_biases == 0 && row.repetition_penalty == 1 && row.frequency_penalty == 0 &&
         row.presence_penalty == 0;
}

// Everything before the temperature, in the order of the API specification.
void ProcessLogits(const ChoiceRow& row, int64_t vocab, float* logits) {
  ApplyMask(row.allowed_mask, vocab, logits);
  for (int i = 0; i < row.num_banned; ++i) {
    if (InVocab(row.banned_ids[i], vocab)) logits[row.banned_ids[i]] = kMasked;
  }
  for (int i = 0; i < row.num_biases; ++i) {
    if (InVocab(row.biases[i].id, vocab)) logits[row.biases[i].id] += row.biases[i].bias;
  }
  ApplyPenalties(row, vocab, logits);
  ApplyMask(row.grammar_mask, vocab, logits);
}

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

// Shortest prefix (in descending order) whose probability reaches top_p. Candidates arrive in
// ascending id and leave sorted.
int64_t KeepTopP(ChoiceScratch& s, int64_t count, float largest, float top_p) {
  // exp(-37) < 2^-53: added to a sum of at least 1 it changes nothing.
  constexpr float kNegligible = 37.0f;
  const auto end = std::remove_if(s.candidates, s.candidates + count, [&](const Candidate& c) {
    return static_cast<double>(largest) - static_cast<double>(c.logit) > kNegligible;
  });
  count = end - s.candidates;
  RadixSortDescending(s.candidates, s.sorted, count);
  // The sort is done with `sorted`, so the probabilities lie there.
  static_assert(sizeof(Candidate) == sizeof(double));
  const auto store = [&](int64_t i, double p) { std::memcpy(s.sorted + i, &p, sizeof(p)); };
  const auto probability = [&](int64_t i) {
    double p;
    std::memcpy(&p, s.sorted + i, sizeof(p));
    return p;
  };
  double total = 0;
  for (int64_t i = 0; i < count; ++i) {
    store(i, std::exp(static_cast<double>(s.candidates[i].logit) - static_cast<double>(largest)));
    total += probability(i);
  }
  const double target = static_cast<double>(top_p) * total;
  double sum = 0;
  for (int64_t i = 0; i < count; ++i) {
    sum += probability(i);
    if (sum >= target) return i + 1;
  }
  return count;
}

// min_p, top_k, top_p over logits already divided by the temperature. Leaves the kept candidates at
// the front of s.candidates, in any order.
int64_t FilterCandidates(const ChoiceRow& row,
                         const float* logits,
                         int64_t vocab,
                         ChoiceScratch& s) {
  const float largest = HWY_DYNAMIC_DISPATCH(ScanLogits)(logits, vocab).largest;
  const float cutoff = row.min_p > 0 ? largest + std::log(row.min_p) : kMasked;
  int64_t count = 0;
  for (int64_t v = 0; v < vocab; ++v) {
    if (logits[v] > kMasked && logits[v] >= cutoff) {
      s.candidates[count++] = {logits[v], static_cast<int32_t>(v)};
    }
  }
  if (row.top_k > 0 && row.top_k < count) {
    std::nth_element(s.candidates, s.candidates + row.top_k - 1, s.candidates + count, Better);
    count = row.top_k;
    if (row.top_p < 1) {
      std::sort(s.candidates, s.candidates + count,
                [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
    }
  }
  return row.top_p < 1 ? KeepTopP(s, count, largest, row.top_p) : count;
}

// Words below words[k] have noise below k / 2: most candidates are ruled out by one comparison,
// without a logarithm. (One word of slack covers the rounding of the table.)
struct NoiseTable {
  static constexpr int kSteps = 46;  // the largest noise is 22.87
  uint32_t words[kSteps + 1] = {};
  NoiseTable() {
    for (int k = 1; k <= kSteps; ++k) {
      const double below = 0x1p32 * std::exp(-std::exp(-0.5 * k));
      words[k] = static_cast<uint32_t>(std::min(below, 0x1p32 - 1)) - 1;
    }
  }
};

// Certainly logit + noise(word) < best? Sums are rounded as in the draw itself, and rounding keeps
// order.
bool CannotWin(const NoiseTable& table, float logit, float best, uint32_t word) {
  const float gap = (best - logit) * 2;
  if (!(gap > 1)) return false;
  const int k = static_cast<int>(std::min(gap, static_cast<float>(NoiseTable::kSteps)));
  return logit + 0.5f * static_cast<float>(k) < best && word < table.words[k];
}

// argmax of logit + noise, lowest id on ties.
int32_t Draw(const ChoiceRow& row, const Candidate* candidates, int64_t count) {
  constexpr float kLargestNoise = 22.9f;  // -ln(-ln(1 - 2^-33)) = 22.87
  const NoiseKey key{row.seed, row.position, row.choice};
  const NoiseTable table;
  float best = kMasked;
  int32_t token = -1;
  const auto draw = [&](const Candidate& c, uint32_t word) {
    if (CannotWin(table, c.logit, best, word)) return;
    const float value = c.logit + GumbelFromWord(word);
    if (value > best || (value == best && c.id < token)) {
      best = value;
      token = c.id;
    }
  };
  if (count == 0) return token;
  // The most likely one first: it rules out most of the others.
  const Candidate& first = *std::min_element(candidates, candidates + count, Better);
  draw(first, NoiseWord(key, static_cast<uint32_t>(first.id)));
  uint32_t tokens[kNoiseBlock] = {}, words[kNoiseBlock];
  int64_t at[kNoiseBlock];
  for (int64_t i = 0; i < count;) {
    int64_t num = 0;
    for (; i < count && num < kNoiseBlock; ++i) {
      at[num] = i;
      tokens[num] = static_cast<uint32_t>(candidates[i].id);
      num += candidates[i].logit + kLargestNoise < best ? 0 : 1;
    }
    HWY_DYNAMIC_DISPATCH(NoiseWords)(key, tokens, num, words);
    for (int64_t k = 0; k < num; ++k)
      draw(candidates[at[k]], words[k]);
  }
  return token;
}

int32_t ChooseRow(
    const ChoiceRow& row, const float* raw, int64_t vocab, float largest, ChoiceScratch& s) {
  const bool greedy = row.temperature < kGreedyBelow;
  if (greedy && IsPlain(row)) return ArgmaxRow(raw, vocab, largest);
  std::memcpy(s.logits, raw, static_cast<size_t>(vocab) * sizeof(float));
  ProcessLogits(row, vocab, s.logits);
  if (greedy) return ArgmaxRow(s.logits, vocab);
  for (int64_t v = 0; v < vocab; ++v)
    s.logits[v] /= row.temperature;
  const int64_t count = FilterCandidates(row, s.logits, vocab, s);
  return Draw(row, s.candidates, count);
}

// Entry 0: the token; then the num_logprobs most likely. Returns the rank of the token.
int32_t WriteLogprobs(const float* raw,
                      int64_t vocab,
                      int32_t token,
                      int count,
                      ChoiceScratch& s,
                      int32_t* ids,
                      float* logprobs) {
  const float largest = HWY_DYNAMIC_DISPATCH(ScanLogits)(raw, vocab).largest;
  const Candidate own = {token >= 0 ? raw[token] : kMasked, token};
  double sum = 0;
  int32_t num_better = 0;
  for (int64_t v = 0; v < vocab; ++v) {
    sum += std::exp(static_cast<double>(raw[v]) - static_cast<double>(largest));
    s.candidates[v] = {raw[v], static_cast<int32_t>(v)};
    num_better += Better(s.candidates[v], own) ? 1 : 0;
  }
  const double log_sum = static_cast<double>(largest) + std::log(sum);
  const auto logprob = [&](float l) {
    return static_cast<float>(static_cast<double>(l) - log_sum);
  };
  ids[0] = token;
  logprobs[0] = token >= 0 ? logprob(raw[token]) : kMasked;
  std::partial_sort(s.candidates, s.candidates + count, s.candidates + vocab, Better);
  for (int i = 0; i < count; ++i) {
    ids[1 + i] = s.candidates[i].id;
    logprobs[1 + i] = logprob(s.candidates[i].logit);
  }
  return token >= 0 ? num_better + 1 : 0;
}

ChoiceScratch TakeChoiceScratch(Arena& arena, int64_t vocab) {
  ChoiceScratch s;
  s.logits = arena.Take<float>(vocab);
  s.candidates = arena.Take<Candidate>(vocab);
  s.sorted = arena.Take<Candidate>(vocab);
  return s;
}

}  // namespace

void ChooseTokensCpu(const ChooseTokensParams& params, const Launch& launch) {
  CHECK(params.logits.dtype == DType::kF32) << DTypeName(params.logits.dtype);
  const int64_t vocab = params.logits.cols;
  const Arena::Scope scope(*launch.arena);
  ChoiceScratch* scratch = launch.arena->Take<ChoiceScratch>(NumThreads(launch));
  for (int i = 0; i < NumThreads(launch); ++i)
    scratch[i] = TakeChoiceScratch(*launch.arena, vocab);
  ParallelRows(launch, params.logits.rows, 1, [&](int64_t begin, int64_t end, int thread_idx) {
    ChoiceScratch& s = scratch[thread_idx];
    for (int64_t t = begin; t < end; ++t) {
      const float* raw = params.logits.Row<float>(t);
      const ChoiceRow& row = params.rows[t];
      const auto [largest, finite] = HWY_DYNAMIC_DISPATCH(ScanLogits)(raw, vocab);
      if (params.non_finite != nullptr) params.non_finite[t] = finite ? 0 : 1;
      params.tokens[t] = !finite                ? -1
                         : row.given_token >= 0 ? row.given_token
                                                : ChooseRow(row, raw, vocab, largest, s);
      if (row.num_logprobs < 0 || !finite) continue;
      CHECK(params.logprobs != nullptr && row.num_logprobs < params.logprob_stride &&
            row.num_logprobs <= vocab)
          << row.num_logprobs << " of " << params.logprob_stride;
      const int32_t rank = WriteLogprobs(raw, vocab, params.tokens[t], row.num_logprobs, s,
                                         params.logprob_ids + t * params.logprob_stride,
                                         params.logprobs + t * params.logprob_stride);
      if (params.logprob_ranks != nullptr) params.logprob_ranks[t] = rank;
    }
  });
}

void ArgmaxCpu(const ArgmaxParams& params, const Launch& launch) {
  CHECK(params.logits.dtype == DType::kF32) << DTypeName(params.logits.dtype);
  ParallelRows(launch, params.logits.rows, 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      params.tokens[t] = ArgmaxRow(params.logits.Row<float>(t), params.logits.cols);
    }
  });
}

void JoinSlicesCpu(const JoinSlicesParams& params, const Launch&) {
  CHECK_EQ(params.parts.rows, params.out.rows * params.num_ranks);
  CHECK_EQ(params.parts.cols * params.num_ranks, params.out.cols);
  const int64_t slice = params.parts.cols;
  for (int64_t part = 0; part < params.num_ranks; ++part) {
    for (int64_t t = 0; t < params.out.rows; ++t) {
      std::memcpy(params.out.Row<float>(t) + part * slice,
                  params.parts.Row<float>(part * params.out.rows + t),
                  static_cast<size_t>(slice) * sizeof(float));
    }
  }
}

std::vector<int32_t> KeptTokens(const float* logits, int64_t vocab, const ChoiceRow& row) {
  const size_t size = static_cast<size_t>(vocab);
  std::vector<float> copy(logits, logits + vocab);
  std::vector<Candidate> candidates(size), sorted(size);
  ChoiceScratch s{copy.data(), candidates.data(), sorted.data()};
  ProcessLogits(row, vocab, s.logits);
  for (float& l : copy)
    l /= row.temperature;
  const int64_t count = FilterCandidates(row, s.logits, vocab, s);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i)
    ids.push_back(s.candidates[i].id);
  std::sort(ids.begin(), ids.end());
  return ids;
}

int64_t ChooseTokensScratchBytesCpu(int64_t vocab, int num_threads) {
  const int64_t bytes = vocab * static_cast<int64_t>(sizeof(float) + 2 * sizeof(Candidate));
  constexpr int64_t kAlignSlack = 6 * static_cast<int64_t>(Arena::kAlign);
  return num_threads * (bytes + kAlignSlack);
}

}  // namespace twinspark
#endif  // HWY_ONCE
