// Sampling on the CPU, one thread per row, in the order of the API: what is done to the logits,
// then the greedy choice, or temperature, filters (candidates.h) and draw (draw.h). Rows without
// extras are read where they lie.
#include "kernels/sampling/choose_tokens.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/parallel_rows.h"
#include "kernels/sampling/candidates.h"
#include "kernels/sampling/draw.h"
#include "kernels/sampling/keyed_noise.h"
#include "kernels/sampling/scan_logits.h"

namespace twinspark {
namespace {

constexpr float kGreedyBelow = 1e-5f;
// A tiny repetition penalty would make a logit infinite; this stays finite when divided by any
// temperature that is not greedy.
constexpr float kLargestPenalized = 1e30f;

int32_t ArgmaxRow(const float* logits, int64_t vocab, const LogitScan& scan) {
  if (scan.largest == kMaskedLogit) return -1;
  return static_cast<int32_t>(FirstOf(logits, vocab, scan.largest, scan.first));
}

void ApplyMask(const uint8_t* mask, int64_t vocab, float* logits) {
  if (mask == nullptr) return;
  for (int64_t v = 0; v < vocab; ++v) {
    if (((mask[v / 8] >> (v % 8)) & 1) == 0) logits[v] = kMaskedLogit;
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
    if (InVocab(row.banned_ids[i], vocab)) logits[row.banned_ids[i]] = kMaskedLogit;
  }
  for (int i = 0; i < row.num_biases; ++i) {
    if (InVocab(row.biases[i].id, vocab)) logits[row.biases[i].id] += row.biases[i].bias;
  }
  ApplyPenalties(row, vocab, logits);
  ApplyMask(row.grammar_mask, vocab, logits);
}

int32_t ChooseRow(const ChoiceRow& row,
                  const float* raw,
                  int64_t vocab,
                  const LogitScan& raw_scan,
                  ChoiceScratch& s) {
  const bool greedy = row.temperature < kGreedyBelow;
  const float* logits = raw;
  LogitScan scan = raw_scan;
  if (!IsPlain(row)) {
    std::memcpy(s.logits, raw, static_cast<size_t>(vocab) * sizeof(float));
    ProcessLogits(row, vocab, s.logits);
    logits = s.logits;
    scan = ScanLogits(logits, vocab);
  }
  if (greedy) return ArgmaxRow(logits, vocab, scan);
  if (row.temperature != 1) {
    DivideLogits(logits, vocab, row.temperature, s.logits);
    logits = s.logits;
  }
  const float largest = scan.largest / row.temperature;  // a division keeps the order
  const Candidates kept = FilterCandidates(row, logits, vocab, largest, s);
  return Draw({row.seed, row.position, row.choice}, kept);
}

// Entry 0: the token; then the num_logprobs most likely. Returns the rank of the token.
int32_t WriteLogprobs(const float* raw,
                      int64_t vocab,
                      int32_t token,
                      int count,
                      ChoiceScratch& s,
                      int32_t* ids,
                      float* logprobs) {
  const float largest = ScanLogits(raw, vocab).largest;
  const Candidate own = {token >= 0 ? raw[token] : kMaskedLogit, token};
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
  logprobs[0] = token >= 0 ? logprob(raw[token]) : kMaskedLogit;
  std::partial_sort(s.candidates, s.candidates + count, s.candidates + vocab, Better);
  for (int i = 0; i < count; ++i) {
    ids[1 + i] = s.candidates[i].id;
    logprobs[1 + i] = logprob(s.candidates[i].logit);
  }
  return token >= 0 ? num_better + 1 : 0;
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
      const LogitScan scan = ScanLogits(raw, vocab);
      if (params.non_finite != nullptr) params.non_finite[t] = scan.finite ? 0 : 1;
      params.tokens[t] = !scan.finite           ? -1
                         : row.given_token >= 0 ? row.given_token
                                                : ChooseRow(row, raw, vocab, scan, s);
      if (row.num_logprobs < 0 || !scan.finite) continue;
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
      const float* logits = params.logits.Row<float>(t);
      params.tokens[t] =
          ArgmaxRow(logits, params.logits.cols, ScanLogits(logits, params.logits.cols));
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
  DivideLogits(s.logits, vocab, row.temperature, s.logits);
  const float largest = ScanLogits(s.logits, vocab).largest;
  const Candidates kept = FilterCandidates(row, s.logits, vocab, largest, s);
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < kept.count; ++i) {
    if (kept.logits[i] > kMaskedLogit) ids.push_back(kept.id(i));
  }
  std::sort(ids.begin(), ids.end());
  return ids;
}

int64_t ChooseTokensScratchBytesCpu(int64_t vocab, int num_threads) {
  constexpr int64_t kAlignSlack = 6 * static_cast<int64_t>(Arena::kAlign);
  return num_threads * (ChoiceScratchBytes(vocab) + kAlignSlack);
}

}  // namespace twinspark
