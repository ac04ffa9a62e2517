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

// The sum of all lanes of (sum0 + sum1) + (sum2 + sum3).
HWY_INLINE float JoinSquares(DF d, VF sum0, VF sum1, VF sum2, VF sum3) {
  return ReduceLanes(d, hn::Add(hn::Add(sum0, sum1), hn::Add(sum2, sum3)));
}

#if HWY_TARGET != HWY_SCALAR
// The same of four vectors in words (vec-inl.h): lanes of `first` are the even lanes of sum0, then
// of sum1; `second` the odd ones; the next two those of sum2 and sum3.
template <class D>
HWY_INLINE float JoinSquaresOfWords(
    D /*d*/, hn::Vec<D> first01, hn::Vec<D> second01, hn::Vec<D> first23, hn::Vec<D> second23) {
  const hn::Half<D> half;
  const auto fold = [&](hn::Vec<D> v) HWY_ATTR {
    return hn::Add(hn::LowerHalf(half, v), hn::UpperHalf(half, v));
  };
  auto v = hn::Add(hn::Add(fold(first01), fold(first23)), hn::Add(fold(second01), fold(second23)));
  v = hn::Add(v, hn::Shuffle2301(v));
  if constexpr (hn::MaxLanes(D()) >= 8) v = hn::Add(v, hn::Shuffle1032(v));
  if constexpr (hn::MaxLanes(D()) >= 16) v = hn::Add(v, hn::SwapAdjacentBlocks(v));
  return hn::GetLane(v);
}
#endif

template <class T>
HWY_INLINE float SumOfSquares(const T* HWY_RESTRICT x, int64_t n) {
  const DF d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  VF sum0 = hn::Zero(d), sum1 = hn::Zero(d), sum2 = hn::Zero(d), sum3 = hn::Zero(d);
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  if (kAllWords<T> && n % (4 * lanes) == 0) {
    for (; i < n; i += 4 * lanes) {
      const Two x0 = LoadTwo<kAllWords<T>>(d, x + i);
      const Two x2 = LoadTwo<kAllWords<T>>(d, x + i + 2 * lanes);
      sum0 = hn::MulAdd(x0.a, x0.a, sum0);
      sum1 = hn::MulAdd(x0.b, x0.b, sum1);
      sum2 = hn::MulAdd(x2.a, x2.a, sum2);
      sum3 = hn::MulAdd(x2.b, x2.b, sum3);
    }
    return JoinSquaresOfWords(d, sum0, sum1, sum2, sum3);
  }
#endif
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
  return JoinSquares(d, sum0, sum1, sum2, sum3);
}

// 1 / sqrt(mean + eps) of n values with this sum of squares; eps may be as small as 1e-20.
HWY_INLINE float InverseRoot(float sum_of_squares, int64_t n, float eps) {
  return 1.0f / std::sqrt(sum_of_squares / static_cast<float>(n) + eps);
}

template <class T>
HWY_INLINE float InverseRms(const T* HWY_RESTRICT x, int64_t n, float eps) {
  return InverseRoot(SumOfSquares(x, n), n, eps);
}

// out = weight * (x * inverse_rms)
template <class In, class Out>
HWY_INLINE void ScaleRow(const In* x, const float* weight, int64_t n, float inverse_rms, Out* out) {
  const DF d;
  const VF r = hn::Set(d, inverse_rms);
  MapVectors<false>(d, n, out, [&](const auto& load) HWY_ATTR {
    return hn::Mul(load(weight), hn::Mul(load(x), r));
  });
}

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
