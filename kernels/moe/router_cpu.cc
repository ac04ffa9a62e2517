// The router on the CPU: gate dot products in the tile-independent order, rows in blocks, widened
// to f32 once, so that a block streams the gate once. Scores are the C library's; an estimate by
// vectors says which experts can be among the chosen, and only those are scored.
#include "kernels/moe/router.h"

#include <algorithm>
#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/moe/router_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/dot-inl.h"
#include "kernels/exp-inl.h"
#include "kernels/parallel_rows.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

// widened: [end - begin, d]; dots: [end - begin, num_experts].
void GateDots(const RouterParams& p, int64_t begin, int64_t end, float* widened, float* dots) {
  const DF d;
  WithFloatType(p.x.dtype, [&](auto* type) {
    using X = std::remove_pointer_t<decltype(type)>;
    for (int64_t r = begin; r < end; ++r) {
      ForVectors(d, p.x.cols, [&](const auto& load, const auto& store) HWY_ATTR {
        store(load(p.x.Row<X>(r)), widened + (r - begin) * p.x.cols);
      });
    }
  });
  WithFloatType(p.gate.dtype, [&](auto* type) {
    using G = std::remove_pointer_t<decltype(type)>;
    DotBlock([&](int64_t r) { return static_cast<const float*>(widened + r * p.x.cols); },
             end - begin, [&](int64_t e) { return static_cast<const G*>(p.gate.Row<G>(e)); },
             p.gate.rows, p.gate.cols, dots, p.gate.rows);
  });
}

// likely[e]: the score of dot z[e], estimated, plus bias[e]. Returns how far off any of them may
// be, or -1 where a value is not finite.
float EstimateScores(const float* z, const float* bias, int64_t num_experts, float* likely) {
  constexpr float kRelativeError = 1e-5f;  // Exp, Log1p and Sqrt: some units in the last place
  constexpr float kFinite = 1e30f;
  const DF d;
  VF largest = hn::Zero(d), all_finite = hn::Set(d, 1.0f);
  ForVectors(d, num_experts, [&](const auto& load, const auto& store) HWY_ATTR {
    const VF x = load(z), offset = load(bias);
    const VF rest = hn::Log1p(d, ExpF32(d, hn::Neg(hn::Abs(x))));
    const VF score = hn::Sqrt(hn::Add(hn::Max(x, hn::Zero(d)), rest));
    const VF size = hn::Add(score, hn::Abs(offset));
    largest = hn::Max(largest, size);
    all_finite =
        hn::IfThenElseZero(hn::Lt(hn::Add(size, hn::Abs(x)), hn::Set(d, kFinite)), all_finite);
    store(hn::Add(score, offset), likely);
  });
  if (hn::GetLane(hn::MinOfLanes(d, all_finite)) != 1.0f) return -1;
  return kRelativeError * hn::GetLane(hn::MaxOfLanes(d, largest));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
namespace {

HWY_EXPORT(GateDots);
HWY_EXPORT(EstimateScores);

// Rows of a block: as f32 at 5,120 channels they take 640 KiB, which a second-level cache holds.
constexpr int64_t kRowsAtOnce = 32;

float SqrtSoftplus(float z) {
  return std::sqrt(std::max(z, 0.0f) + std::log1p(std::exp(-std::abs(z))));
}

// Scratch of one thread, for one row.
struct ChoiceScratch {
  float* likely = nullptr;     // [num_experts]
  float* best = nullptr;       // [num_experts], num_chosen used
  int32_t* experts = nullptr;  // [num_experts]
};

// The count-th largest of n values; best: the count largest, descending.
float CountLargest(const float* values, int64_t n, int64_t count, float* best) {
  std::fill(best, best + count, -std::numeric_limits<float>::infinity());
  for (int64_t i = 0; i < n; ++i) {
    if (!(values[i] > best[count - 1])) continue;
    int64_t at = count - 1;
    for (; at > 0 && best[at - 1] < values[i]; --at)
      best[at] = best[at - 1];
    best[at] = values[i];
  }
  return best[count - 1];
}

// Turns dots into scores, of the experts that can be chosen at least, and lists these; returns how
// many. An expert below the num_chosen-th estimate by more than both may be off cannot be chosen.
int64_t ScoreExperts(const RouterParams& p, float* s, const float* bias, ChoiceScratch& scratch) {
  const int64_t num_experts = p.gate.rows;
  const float off = p.scores.data != nullptr ? -1.0f
                                             : HWY_DYNAMIC_DISPATCH(EstimateScores)(
                                                   s, bias, num_experts, scratch.likely);
  float cutoff = 0;
  if (off >= 0) {
    cutoff = CountLargest(scratch.likely, num_experts, p.num_chosen, scratch.best) - 2 * off;
  }
  int64_t count = 0;
  for (int64_t e = 0; e < num_experts; ++e) {
    if (off >= 0 && scratch.likely[e] < cutoff) continue;
    s[e] = SqrtSoftplus(s[e]);
    scratch.experts[count++] = static_cast<int32_t>(e);
  }
  return count;
}

// Chooses by s + bias, weighs by s. s: the row's dots, afterwards its scores.
void ChooseExperts(
    const RouterParams& p, int64_t t, float* s, const float* bias, ChoiceScratch& scratch) {
  int32_t* ids = p.ids.Row<int32_t>(t);
  float* weights = p.weights.Row<float>(t);
  const int64_t count = ScoreExperts(p, s, bias, scratch);
  for (int k = 0; k < p.num_chosen; ++k) {
    int64_t best = -1;
    float best_score = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t e = scratch.experts[i];
      if (e < 0) continue;  // chosen
      const float score = s[e] + bias[e];
      // The first free expert is the fallback, so NaN scores still give distinct ids.
      if (best < 0 || score > best_score) {
        best = i;
        best_score = score;
      }
    }
    ids[k] = scratch.experts[best];
    weights[k] = s[ids[k]];
    scratch.experts[best] = -1;
  }
  float sum = 0;
  for (int k = 0; k < p.num_chosen; ++k)
    sum += weights[k];
  for (int k = 0; k < p.num_chosen; ++k) {
    if (p.num_chosen > 1) weights[k] /= sum + 1e-20f;
    weights[k] *= p.scaling_factor;
  }
}

}  // namespace

void RouterCpu(const RouterParams& params, const Launch& launch) {
  const int64_t num_experts = params.gate.rows;
  CHECK_EQ(params.x.cols, params.gate.cols);
  CHECK(params.num_chosen >= 1 && params.num_chosen <= num_experts) << params.num_chosen;
  CHECK_EQ(params.ids.cols, int64_t{params.num_chosen});
  CHECK_EQ(params.weights.cols, int64_t{params.num_chosen});
  CHECK(params.image_mask == nullptr || params.image_bias != nullptr);
  const Arena::Scope scope(*launch.arena);
  const int64_t d = params.x.cols;
  const int64_t rows_at_once = std::min(kRowsAtOnce, params.x.rows);
  float* widened = launch.arena->Take<float>(NumThreads(launch) * rows_at_once * d);
  float* dots = launch.arena->Take<float>(NumThreads(launch) * rows_at_once * num_experts);
  ChoiceScratch* choice = launch.arena->Take<ChoiceScratch>(NumThreads(launch));
  for (int i = 0; i < NumThreads(launch); ++i) {
    choice[i] = {.likely = launch.arena->Take<float>(num_experts),
                 .best = launch.arena->Take<float>(num_experts),
                 .experts = launch.arena->Take<int32_t>(num_experts)};
  }
  const int64_t grain = RowGrain(0.03 * static_cast<double>(num_experts * params.x.cols));
  ParallelRows(launch, params.x.rows, grain, [&](int64_t begin, int64_t end, int thread_idx) {
    float* scores = dots + thread_idx * rows_at_once * num_experts;
    for (int64_t t = begin; t < end; t += rows_at_once) {
      const int64_t stop = std::min(end, t + rows_at_once);
      HWY_DYNAMIC_DISPATCH(GateDots)
      (params, t, stop, widened + thread_idx * rows_at_once * d, scores);
      for (int64_t r = t; r < stop; ++r) {
        float* s = scores + (r - t) * num_experts;
        const bool image = params.image_mask != nullptr && params.image_mask[r] != 0;
        ChooseExperts(params, r, s, image ? params.image_bias : params.bias, choice[thread_idx]);
        if (params.scores.data != nullptr) {
          std::copy(s, s + num_experts, params.scores.Row<float>(r));
        }
      }
    }
  });
}

int64_t RouterScratchBytesCpu(int64_t num_rows, int64_t d, int num_experts, int num_threads) {
  const int64_t row_bytes = (d + num_experts) * static_cast<int64_t>(sizeof(float));
  const int64_t choice_bytes = static_cast<int64_t>(sizeof(ChoiceScratch)) +
                               3 * num_experts * static_cast<int64_t>(sizeof(float));
  constexpr int64_t kAlignSlack = 6 * static_cast<int64_t>(Arena::kAlign);
  return num_threads * (std::min(kRowsAtOnce, num_rows) * row_bytes + choice_bytes + kAlignSlack);
}

}  // namespace twinspark
#endif  // HWY_ONCE
