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

// likely[i]: the score of dot z[i], estimated, plus bias[i], for all experts of some rows, one
// after the other. Returns how far off any of them may be, or -1 where a value is not finite.
float EstimateScores(const float* z, const float* bias, int64_t count, float* likely) {
  constexpr float kRelativeError = 1e-5f;  // Exp, Log1p and Sqrt: some units in the last place
  constexpr float kFinite = 1e30f;
  const DF d;
  VF largest = hn::Zero(d), all_finite = hn::Set(d, 1.0f);
  ForVectors(d, count, [&](const auto& load, const auto& store) HWY_ATTR {
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

// Scratch of one thread, for a block of rows.
struct RouterScratch {
  float* widened = nullptr;    // [rows, d]
  float* scores = nullptr;     // [rows, num_experts]: dots, then scores where they matter
  float* bias = nullptr;       // [rows, num_experts]
  float* likely = nullptr;     // [rows, num_experts]
  float* best = nullptr;       // [num_experts], num_chosen used
  int32_t* experts = nullptr;  // [rows, num_experts]: those that can be chosen, ascending
  int64_t* counts = nullptr;   // [rows]: how many
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

// Lists the experts of each row that can be chosen and turns their dots into scores. An expert
// below the num_chosen-th estimate by more than both may be off cannot be chosen.
void ScoreExperts(const RouterParams& p, int64_t num_rows, const RouterScratch& scratch) {
  const int64_t num_experts = p.gate.rows;
  const float off = p.scores.data != nullptr
                        ? -1.0f
                        : HWY_DYNAMIC_DISPATCH(EstimateScores)(
                              scratch.scores, scratch.bias, num_rows * num_experts, scratch.likely);
  for (int64_t r = 0; r < num_rows; ++r) {
    const float* likely = scratch.likely + r * num_experts;
    int32_t* experts = scratch.experts + r * num_experts;
    int64_t count = 0;
    if (off < 0) {
      for (; count < num_experts; ++count)
        experts[count] = static_cast<int32_t>(count);
    } else {
      const float cutoff = CountLargest(likely, num_experts, p.num_chosen, scratch.best) - 2 * off;
      for (int64_t e = 0; e < num_experts; ++e) {
        experts[count] = static_cast<int32_t>(e);
        count += likely[e] < cutoff ? 0 : 1;
      }
    }
    scratch.counts[r] = count;
  }
  for (int64_t r = 0; r < num_rows; ++r) {
    float* s = scratch.scores + r * num_experts;
    for (int64_t i = 0; i < scratch.counts[r]; ++i) {
      float& score = s[scratch.experts[r * num_experts + i]];
      score = SqrtSoftplus(score);
    }
  }
}

// Chooses by s + bias, weighs by s. s: scores of the `count` experts that can be chosen.
void ChooseExperts(const RouterParams& p,
                   int64_t t,
                   const float* s,
                   const float* bias,
                   int32_t* experts,
                   int64_t count) {
  int32_t* ids = p.ids.Row<int32_t>(t);
  float* weights = p.weights.Row<float>(t);
  for (int k = 0; k < p.num_chosen; ++k) {
    int64_t best = -1;
    float best_score = 0;
    for (int64_t i = 0; i < count; ++i) {
      const int32_t e = experts[i];
      if (e < 0) continue;  // chosen
      const float score = s[e] + bias[e];
      // The first free expert is the fallback, so NaN scores still give distinct ids.
      if (best < 0 || score > best_score) {
        best = i;
        best_score = score;
      }
    }
    ids[k] = experts[best];
    weights[k] = s[ids[k]];
    experts[best] = -1;
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
  RouterScratch* scratch = launch.arena->Take<RouterScratch>(NumThreads(launch));
  for (int i = 0; i < NumThreads(launch); ++i) {
    const int64_t all = rows_at_once * num_experts;
    scratch[i] = {.widened = launch.arena->Take<float>(rows_at_once * d),
                  .scores = launch.arena->Take<float>(all),
                  .bias = launch.arena->Take<float>(all),
                  .likely = launch.arena->Take<float>(all),
                  .best = launch.arena->Take<float>(num_experts),
                  .experts = launch.arena->Take<int32_t>(all),
                  .counts = launch.arena->Take<int64_t>(rows_at_once)};
  }
  const int64_t grain = RowGrain(0.03 * static_cast<double>(num_experts * params.x.cols));
  ParallelRows(launch, params.x.rows, grain, [&](int64_t begin, int64_t end, int thread_idx) {
    const RouterScratch& s = scratch[thread_idx];
    for (int64_t t = begin; t < end; t += rows_at_once) {
      const int64_t count = std::min(end - t, rows_at_once);
      HWY_DYNAMIC_DISPATCH(GateDots)(params, t, t + count, s.widened, s.scores);
      for (int64_t r = 0; r < count; ++r) {
        const bool image = params.image_mask != nullptr && params.image_mask[t + r] != 0;
        std::copy_n(image ? params.image_bias : params.bias, num_experts, s.bias + r * num_experts);
      }
      ScoreExperts(params, count, s);
      for (int64_t r = 0; r < count; ++r) {
        const int64_t at = r * num_experts;
        ChooseExperts(params, t + r, s.scores + at, s.bias + at, s.experts + at, s.counts[r]);
        if (params.scores.data != nullptr)
          std::copy_n(s.scores + at, num_experts, params.scores.Row<float>(t + r));
      }
    }
  });
}

int64_t RouterScratchBytesCpu(int64_t num_rows, int64_t d, int num_experts, int num_threads) {
  constexpr int64_t kF32Bytes = static_cast<int64_t>(sizeof(float));
  const int64_t row_bytes =
      (d + 4 * num_experts) * kF32Bytes + static_cast<int64_t>(sizeof(int64_t));
  const int64_t thread_bytes =
      static_cast<int64_t>(sizeof(RouterScratch)) + num_experts * kF32Bytes;
  constexpr int64_t kAlignSlack = 9 * static_cast<int64_t>(Arena::kAlign);
  return num_threads * (std::min(kRowsAtOnce, num_rows) * row_bytes + thread_bytes + kAlignSlack);
}

}  // namespace twinspark
#endif  // HWY_ONCE
