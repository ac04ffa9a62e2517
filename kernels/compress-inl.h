// Moving some lanes of a vector next to each other, once per SIMD target. In a register: the form
// that stores takes a hundred cycles on Zen 4. AVX2 has no such instruction, and Highway's way
// copies its table of 1 KiB to the stack for every vector, so there is a table here.

// clang-format off
#if defined(TWINSPARK_KERNELS_COMPRESS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWINSPARK_KERNELS_COMPRESS_INL_H_
#undef TWINSPARK_KERNELS_COMPRESS_INL_H_
#else
#define TWINSPARK_KERNELS_COMPRESS_INL_H_
#endif
// clang-format on

#include <bit>
#include <cstdint>

#include "hwy/highway.h"

#ifndef TWINSPARK_KERNELS_COMPRESS_TABLE_
#define TWINSPARK_KERNELS_COMPRESS_TABLE_
namespace twinspark {

// packed[bits]: the numbers of the lanes whose bit is set, ascending, four bits each.
struct CompressTable {
  uint32_t packed[256] = {};
  constexpr CompressTable() {
    for (uint32_t bits = 0; bits < 256; ++bits) {
      int at = 0;
      for (uint32_t lane = 0; lane < 8; ++lane) {
        if (((bits >> lane) & 1) != 0) packed[bits] |= lane << (4 * at++);
      }
    }
  }
};
inline constexpr CompressTable kCompressTable;

}  // namespace twinspark
#endif  // TWINSPARK_KERNELS_COMPRESS_TABLE_

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Which 32-bit lanes are kept.
template <class D>
class KeptLanes {
 public:
#if HWY_TARGET == HWY_AVX2
  HWY_INLINE KeptLanes(D /*d*/, hn::Mask<D> keep) {
    const auto bits =
        static_cast<uint32_t>(_mm256_movemask_ps(_mm256_castsi256_ps(Bits(keep.raw))));
    const __m256i shifts = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
    count_ = std::popcount(bits);
    order_ = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int32_t>(kCompressTable.packed[bits])),
                               shifts);
  }
  // The kept lanes of v in their order, then any others.
  template <class V>
  HWY_INLINE V Together(V v) const {
    const hn::DFromV<V> d;
    const hn::RebindToUnsigned<decltype(d)> du;
    auto moved = hn::BitCast(du, v);
    moved.raw = _mm256_permutevar8x32_epi32(moved.raw, order_);
    return hn::BitCast(d, moved);
  }
#else
  HWY_INLINE KeptLanes(D d, hn::Mask<D> keep)
      : keep_(keep), count_(static_cast<int64_t>(hn::CountTrue(d, keep))) {}
  template <class V>
  HWY_INLINE V Together(V v) const {
    const hn::DFromV<V> d;
    return hn::Compress(v, hn::RebindMask(d, keep_));
  }
#endif
  int64_t count() const {
    return count_;
  }

 private:
#if HWY_TARGET == HWY_AVX2
  static HWY_INLINE __m256i Bits(__m256i mask) {
    return mask;
  }
  static HWY_INLINE __m256i Bits(__m256 mask) {
    return _mm256_castps_si256(mask);
  }
  __m256i order_;
#else
  hn::Mask<D> keep_;
#endif
  int64_t count_;
};

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
