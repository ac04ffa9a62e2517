// The router on the CPU: gate dot products in the tile-independent order, the rest on scalars. Rows
// go through in blocks, widened to f32 once, so that a block streams the gate once.
#include "kernels/moe/router.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/moe/router_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/parallel_rows.h"
#include "kernels/vec-inl.h"

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

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
namespace {

HWY_EXPORT(GateDots);

// Rows of a block: as f32 at 5,120 channels they take 640 KiB, which a second-level cache holds.
constexpr int64_t kRowsAtOnce = 32;

float SqrtSoftplus(float z) {
  return std::sqrt(std::max(z, 0.0f) + std::log1p(std::exp(-std::abs(z))));
}

// Chooses by s + bias, weighs by s. `taken` marks chosen experts.
void ChooseExperts(
    const RouterParams& p, int64_t t, const float* s, const float* bias, uint8_t* taken) {
  const int64_t num_experts = p.gate.rows;
  int32_t* ids = p.ids.Row<int32_t>(t);
  float* weights = p.weights.Row<float>(t);
  std::fill(taken, taken + num_experts, uint8_t{0});
  for (int k = 0; k < p.num_chosen; ++k) {
    int64_t best = -1;
    float best_score = 0;
    for (int64_t e = 0; e < num_experts; ++e) {
      if (taken[e] != 0) continue;
      const float score = s[e] + bias[e];
      // The first free expert is the fallback, so NaN scores still give distinct ids.
      if (best < 0 || score > best_score) {
        best = e;
        best_score = score;
      }
    }
    taken[best] = 1;
    ids[k] = static_cast<int32_t>(best);
    weights[k] = s[best];
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
  uint8_t* taken = launch.arena->Take<uint8_t>(NumThreads(launch) * num_experts);
  const int64_t grain = RowGrain(0.03 * static_cast<double>(num_experts * params.x.cols));
  ParallelRows(launch, params.x.rows, grain, [&](int64_t begin, int64_t end, int thread_idx) {
    float* scores = dots + thread_idx * rows_at_once * num_experts;
    for (int64_t t = begin; t < end; t += rows_at_once) {
      const int64_t stop = std::min(end, t + rows_at_once);
      HWY_DYNAMIC_DISPATCH(GateDots)
      (params, t, stop, widened + thread_idx * rows_at_once * d, scores);
      for (int64_t r = t; r < stop; ++r) {
        float* s = scores + (r - t) * num_experts;
        for (int64_t e = 0; e < num_experts; ++e)
          s[e] = SqrtSoftplus(s[e]);
        if (params.scores.data != nullptr) {
          std::copy(s, s + num_experts, params.scores.Row<float>(r));
        }
        const bool image = params.image_mask != nullptr && params.image_mask[r] != 0;
        ChooseExperts(params, r, s, image ? params.image_bias : params.bias,
                      taken + thread_idx * num_experts);
      }
    }
  });
}

int64_t RouterScratchBytesCpu(int64_t num_rows, int64_t d, int num_experts, int num_threads) {
  const int64_t row_bytes = (d + num_experts) * static_cast<int64_t>(sizeof(float));
  constexpr int64_t kAlignSlack = 4 * static_cast<int64_t>(Arena::kAlign);
  return num_threads * (std::min(kRowsAtOnce, num_rows) * row_bytes + num_experts) + kAlignSlack;
}

}  // namespace twinspark
#endif  // HWY_ONCE
