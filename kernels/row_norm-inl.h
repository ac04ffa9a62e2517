// RMSNorm of one row, shared by the plain norm and the fused collapse. Once per SIMD target.

// clang-format off
#if defined(TWINSPARK_KERNELS_ROW_NORM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWINSPARK_KERNELS_ROW_NORM_INL_H_
#undef TWINSPARK_KERNELS_ROW_NORM_INL_H_
#else
#define TWINSPARK_KERNELS_ROW_NORM_INL_H_
#endif
// clang-format on

#include <cmath>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {

template <class T>
HWY_INLINE float SumOfSquares(const T* HWY_RESTRICT x, int64_t n) {
  const DF d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  VF sum0 = hn::Zero(d), sum1 = hn::Zero(d), sum2 = hn::Zero(d), sum3 = hn::Zero(d);
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    const VF x0 = LoadF32(d, x + i), x1 = LoadF32(d, x + i + lanes);
    const VF x2 = LoadF32(d, x + i + 2 * lanes), x3 = LoadF32(d, x + i + 3 * lanes);
    sum0 = hn::MulAdd(x0, x0, sum0);
    sum1 = hn::MulAdd(x1, x1, sum1);
    sum2 = hn::MulAdd(x2, x2, sum2);
    sum3 = hn::MulAdd(x3, x3, sum3);
  }
  for (; i + lanes <= n; i += lanes) {
    const VF x0 = LoadF32(d, x + i);
    sum0 = hn::MulAdd(x0, x0, sum0);
  }
  if (i < n) {
    const VF x0 = LoadTail(d, x + i, n - i);
    sum1 = hn::MulAdd(x0, x0, sum1);
  }
  return ReduceLanes(d, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3)));
}

// 1 / sqrt(mean + eps) of n values with this sum of squares; eps may be as small as 1e-20.
HWY_INLINE float InverseRoot(float sum_of_squares, int64_t n, float eps) {
  return 1.0f / std::sqrt(sum_of_squares / static_cast<float>(n) + eps);
}

template <class T>
HWY_INLINE float InverseRms(const T* HWY_RESTRICT x, int64_t n, float eps) {
  return InverseRoot(SumOfSquares(x, n), n, eps);
}

template <class In, class Out>
HWY_INLINE void NormRow(const In* x, const float* weight, int64_t n, float eps, Out* out) {
  const DF d;
  const VF r = hn::Set(d, InverseRms(x, n, eps));
  ForVectors(d, n, [&](const auto& load, const auto& store) HWY_ATTR {
    store(hn::Mul(load(weight), hn::Mul(load(x), r)), out);
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
