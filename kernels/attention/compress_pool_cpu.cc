// Pooling of the compressor on the CPU: a softmax per channel over the tokens of a group.
#include "kernels/attention/compress_pool.h"

#include <algorithm>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/compress_pool_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/exp-inl.h"
#include "kernels/parallel_rows.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

constexpr int kMaxRatio = 8;

// kRatio: the number of tokens where it has code of its own, so that scores stay in registers; else
// 0.
template <int kRatio, class Out>
void PoolGroup(const float* const* tokens, int ratio, int64_t n, Out* out) {
  const DF d;
  const int count = kRatio == 0 ? ratio : kRatio;
  MapVectors<false>(d, n, out, [&](const auto& load) HWY_ATTR {
    VF score[kRatio == 0 ? kMaxRatio : kRatio];
    if constexpr (kRatio == 0) std::fill(score, score + kMaxRatio, hn::Zero(d));
    VF largest = load(tokens[0] + n);
    TWINSPARK_UNROLL
    for (int i = 0; i < count; ++i) {
      score[i] = load(tokens[i] + n);
      largest = hn::Max(largest, score[i]);
    }
    VF sum = hn::Zero(d);
    TWINSPARK_UNROLL
    for (int i = 0; i < count; ++i) {
      score[i] = ExpF32(d, hn::Sub(score[i], largest));
      sum = hn::Add(sum, score[i]);
    }
    VF pooled = hn::Zero(d);
    TWINSPARK_UNROLL
    for (int i = 0; i < count; ++i)
      pooled = hn::MulAdd(hn::Div(score[i], sum), load(tokens[i]), pooled);
    return pooled;
  });
}

void PoolGroups(const CompressPoolParams& p, int64_t begin, int64_t end) {
  WithFloatType(p.out.dtype, [&](auto* type) {
    using Out = std::remove_pointer_t<decltype(type)>;
    for (int64_t g = begin; g < end; ++g) {
      const float* tokens[kMaxRatio];
      for (int i = 0; i < p.ratio; ++i) {
        const int64_t source = p.sources[g * p.ratio + i];
        if (source >= 0) {
          CHECK_LT(source, p.kv_score.rows);
          tokens[i] = p.kv_score.Row<float>(source);
        } else {
          CHECK_LT(-1 - source, p.carry.num_rows);
          tokens[i] = static_cast<const float*>(p.carry.data) + (-1 - source) * p.carry.cols;
        }
      }
      if (p.ratio == 2) {
        PoolGroup<2>(tokens, p.ratio, p.out.cols, p.out.Row<Out>(g));
      } else {
        PoolGroup<0>(tokens, p.ratio, p.out.cols, p.out.Row<Out>(g));
      }
    }
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
HWY_EXPORT(PoolGroups);

void CompressPoolCpu(const CompressPoolParams& params, const Launch& launch) {
  CHECK(params.ratio >= 1 && params.ratio <= 8) << params.ratio;
  CHECK(params.kv_score.dtype == DType::kF32);
  CHECK(params.carry.format == CacheFormat::kF32);
  CHECK_EQ(params.kv_score.cols, 2 * params.out.cols);
  CHECK_EQ(params.carry.cols, 2 * params.out.cols);
  const int64_t grain = RowGrain(1.0 * static_cast<double>(params.ratio * params.out.cols));
  ParallelRows(launch, params.out.rows, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(PoolGroups)(params, begin, end);
  });
}

}  // namespace twinspark
#endif  // HWY_ONCE
