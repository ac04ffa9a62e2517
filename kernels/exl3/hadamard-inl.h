// Hadamard128 of one block with Highway, see hadamard.h: strides 1 and 2 inside 128-bit vectors,
// the others between vectors. Included once per SIMD target.
#if defined(TWINSPARK_KERNELS_EXL3_HADAMARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWINSPARK_KERNELS_EXL3_HADAMARD_INL_H_
#undef TWINSPARK_KERNELS_EXL3_HADAMARD_INL_H_
#else
#define TWINSPARK_KERNELS_EXL3_HADAMARD_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Butterflies between vectors of N lanes at distances h and 2h (in floats), over all 128 values.
template <class D>
HWY_INLINE void ButterfliesTwoStrides(D d, size_t h, float* HWY_RESTRICT v) {
  const size_t lanes = hn::Lanes(d);
  for (size_t base = 0; base < 128; base += 4 * h) {
    for (size_t i = base; i < base + h; i += lanes) {
      const auto p = hn::LoadU(d, v + i);
      const auto q = hn::LoadU(d, v + i + h);
      const auto r = hn::LoadU(d, v + i + 2 * h);
      const auto s = hn::LoadU(d, v + i + 3 * h);
      const auto p1 = hn::Add(p, q);
      const auto q1 = hn::Sub(p, q);
      const auto r1 = hn::Add(r, s);
      const auto s1 = hn::Sub(r, s);
      hn::StoreU(hn::Add(p1, r1), d, v + i);
      hn::StoreU(hn::Add(q1, s1), d, v + i + h);
      hn::StoreU(hn::Sub(p1, r1), d, v + i + 2 * h);
      hn::StoreU(hn::Sub(q1, s1), d, v + i + 3 * h);
    }
  }
}

#if HWY_TARGET == HWY_SCALAR

HWY_INLINE void HadamardBlock(float* HWY_RESTRICT v) {
  for (size_t h = 1; h < 128; h *= 2) {
    for (size_t base = 0; base < 128; base += 2 * h) {
      for (size_t i = base; i < base + h; ++i) {
        const float a = v[i];
        const float b = v[i + h];
        v[i] = a + b;
        v[i + h] = a - b;
      }
    }
  }
}

#else

HWY_INLINE void HadamardBlock(float* HWY_RESTRICT v) {
  const hn::CappedTag<float, 4> d4;
  const hn::RebindToUnsigned<decltype(d4)> du;
  HWY_ALIGN static constexpr uint32_t kOdd[4] = {0, 0x80000000u, 0, 0x80000000u};
  HWY_ALIGN static constexpr uint32_t kUpper[4] = {0, 0, 0x80000000u, 0x80000000u};
  const auto odd = hn::BitCast(d4, hn::Load(du, kOdd));
  const auto upper = hn::BitCast(d4, hn::Load(du, kUpper));
  // With (a, b) and its swap (b, a): swap + (a, -b) = (b + a, a - b); both sums are exact twins.
  const auto inside = [&](auto x) HWY_ATTR {
    x = hn::Add(hn::Shuffle2301(x), hn::Xor(x, odd));
    return hn::Add(hn::Shuffle1032(x), hn::Xor(x, upper));
  };
  for (size_t i = 0; i < 128; i += 8) {
    const auto x = inside(hn::LoadU(d4, v + i));
    const auto y = inside(hn::LoadU(d4, v + i + 4));
    hn::StoreU(hn::Add(x, y), d4, v + i);
    hn::StoreU(hn::Sub(x, y), d4, v + i + 4);
  }
  const hn::CappedTag<float, 8> d8;
  ButterfliesTwoStrides(d8, 8, v);
  ButterfliesTwoStrides(d8, 32, v);
}

#endif  // HWY_SCALAR

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#endif  // toggle
