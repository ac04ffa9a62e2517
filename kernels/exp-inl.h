// The exponential of vectors (Highway's polynomial, about one unit in the last place), once per
// SIMD target. A header of its own so that only ops that need it pay for compiling it.

// clang-format off
#if defined(TWINSPARK_KERNELS_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWINSPARK_KERNELS_EXP_INL_H_
#undef TWINSPARK_KERNELS_EXP_INL_H_
#else
#define TWINSPARK_KERNELS_EXP_INL_H_
#endif
// clang-format on

#include "hwy/contrib/math/math-inl.h"
#include "kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {

HWY_INLINE VF ExpF32(DF d, VF x) {
  return hn::Exp(d, x);
}

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
