// What the Highway code of several ops shares, once per SIMD target: loads and stores that convert
// (bf16 rounds to nearest even at the store), tails, and sums of lanes in one fixed order.
// ReduceTree and DotTile give every output the same association whatever the shape of the tile it
// was computed in, which is what makes rows independent of how many are computed together.

// clang-format off
#if defined(TWINSPARK_KERNELS_VEC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWINSPARK_KERNELS_VEC_INL_H_
#undef TWINSPARK_KERNELS_VEC_INL_H_
#else
#define TWINSPARK_KERNELS_VEC_INL_H_
#endif
// clang-format on

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common/check.h"
#include "hwy/highway.h"
#include "kernels/dtype.h"
#include "kernels/unroll.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

using DF = hn::ScalableTag<float>;
using VF = hn::Vec<DF>;

template <class D>
HWY_INLINE hn::Vec<D> LoadF32([[maybe_unused]] D d, const float* p) {
  return hn::LoadU(d, p);
}
template <class D>
HWY_INLINE hn::Vec<D> LoadF32([[maybe_unused]] D d, const Bf16* p) {
  const hn::RebindToUnsigned<D> d32;
  const hn::Rebind<uint16_t, D> d16;
  const auto bits = hn::PromoteTo(d32, hn::LoadU(d16, reinterpret_cast<const uint16_t*>(p)));
  return hn::BitCast(d, hn::ShiftLeft<16>(bits));
}

template <class D>
HWY_INLINE void StoreF32(hn::Vec<D> v, [[maybe_unused]] D d, float* p) {
  hn::StoreU(v, d, p);
}
template <class D>
HWY_INLINE void StoreF32(hn::Vec<D> v, [[maybe_unused]] D d, Bf16* p) {
  const hn::RebindToUnsigned<D> d32;
  const hn::RebindToSigned<D> di32;
  const hn::Rebind<uint16_t, D> d16;
  const auto bits = hn::BitCast(d32, v);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto odd = hn::And(upper, hn::Set(d32, 1u));
  const auto rounded = hn::ShiftRight<16>(hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fffu))));
  const auto quiet = hn::Or(upper, hn::Set(d32, 0x40u));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(v));
  const auto result = hn::IfThenElse(is_nan, quiet, rounded);
  hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di32, result)), d16, reinterpret_cast<uint16_t*>(p));
}

// Rounds to bf16 and stays f32.
template <class D>
HWY_INLINE hn::Vec<D> RoundToBf16(D d, hn::Vec<D> v) {
  const hn::RebindToUnsigned<D> d32;
  const auto bits = hn::BitCast(d32, v);
  const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(d32, 1u));
  const auto rounded = hn::Add(bits, hn::Add(odd, hn::Set(d32, 0x7fffu)));
  const auto quiet = hn::Or(bits, hn::Set(d32, 0x400000u));
  const auto is_nan = hn::RebindMask(d32, hn::IsNaN(v));
  return hn::BitCast(d, hn::And(hn::IfThenElse(is_nan, quiet, rounded), hn::Set(d32, 0xffff0000u)));
}
template <class T>
HWY_INLINE VF RoundAs(DF d, VF v) {
  if constexpr (std::is_same_v<T, Bf16>) return RoundToBf16(d, v);
  return v;
}

// A tail is shorter than a vector, so with one lane there is none. Checked for the compiler too,
// which otherwise sees copies beyond the buffers below.
HWY_INLINE void CheckTail(int64_t count) {
  CHECK(count >= 0 && count < static_cast<int64_t>(hn::MaxLanes(DF()))) << count;
}

// The first `count` lanes of what lies at p, the others zero; reads nothing behind p + count.
template <class T>
HWY_INLINE VF LoadTail(DF d, const T* p, int64_t count) {
  CheckTail(count);
  HWY_ALIGN T buffer[hn::MaxLanes(DF())] = {};
  std::memcpy(buffer, p, static_cast<size_t>(count) * sizeof(T));
  return LoadF32(d, buffer);
}
template <class T>
HWY_INLINE void StoreTail(VF v, DF d, T* p, int64_t count) {
  CheckTail(count);
  HWY_ALIGN T buffer[hn::MaxLanes(DF())];
  StoreF32(v, d, buffer);
  std::memcpy(p, buffer, static_cast<size_t>(count) * sizeof(T));
}

// Calls body(load, store, i) for every vector of a row of n values, the tail last, so that one
// lambda serves both: load(p) reads lanes of p[i..], store(v, p) writes them.
template <class Body>
HWY_INLINE void ForVectors(DF d, int64_t n, const Body& body) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    body([&](const auto* p) HWY_ATTR { return LoadF32(d, p + i); },
         [&](VF v, auto* p) HWY_ATTR { StoreF32(v, d, p + i); });
  }
  if (i < n) {
    body([&](const auto* p) HWY_ATTR { return LoadTail(d, p + i, n - i); },
         [&](VF v, auto* p) HWY_ATTR { StoreTail(v, d, p + i, n - i); });
  }
}

// Sums of neighbouring lanes: those of lo, then those of hi. (With one lane there are no neighbours
// and no caller comes here; the fallback target lacks the shuffles.)
HWY_INLINE VF SumNeighbours([[maybe_unused]] DF d, VF hi, VF lo) {
#if HWY_TARGET == HWY_SCALAR
  return hn::Add(hi, lo);
#else
  return hn::Add(hn::ConcatEven(d, hi, lo), hn::ConcatOdd(d, hi, lo));
#endif
}

// Sum of all lanes: neighbours first, in the association of ReduceTree.
HWY_INLINE float ReduceLanes(DF d, VF v) {
  for (size_t width = hn::Lanes(d); width > 1; width /= 2)
    v = SumNeighbours(d, v, v);
  return hn::GetLane(v);
}

// Lane i of the result is ReduceLanes(tile[i]), with shared shuffles; kCount = number of lanes.
template <int kCount>
HWY_INLINE VF ReduceTree(DF d, const VF* tile) {
  if constexpr (kCount == 1) {
    return tile[0];
  } else {
    return SumNeighbours(d, ReduceTree<kCount / 2>(d, tile + kCount / 2),
                         ReduceTree<kCount / 2>(d, tile));
  }
}

constexpr int kVectorLanes = static_cast<int>(hn::MaxLanes(DF()));
constexpr int RoundUpToLanes(int count) {
  return (count + kVectorLanes - 1) / kVectorLanes * kVectorLanes;
}

// out[r * out_stride + j] = a[r] . b[j] over n values for kRows x kCols pairs. One accumulator per
// pair, so a pair has the same bits in every tile shape.
template <int kRows, int kCols, class TA, class TB>
HWY_INLINE void DotTile(const TA* const* a,
                        const TB* const* b,
                        int64_t n,
                        float* HWY_RESTRICT out,
                        int64_t out_stride) {
  const DF d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  constexpr int kPadded = RoundUpToLanes(kRows * kCols);
  VF sum[kPadded];
  TWINSPARK_UNROLL
  for (int i = 0; i < kPadded; ++i)
    sum[i] = hn::Zero(d);
  int64_t i = 0;
  for (; i + lanes <= n; i += lanes) {
    VF bv[kCols];
    TWINSPARK_UNROLL
    for (int j = 0; j < kCols; ++j)
      bv[j] = LoadF32(d, b[j] + i);
    TWINSPARK_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const VF av = LoadF32(d, a[r] + i);
      TWINSPARK_UNROLL
      for (int j = 0; j < kCols; ++j)
        sum[r * kCols + j] = hn::MulAdd(av, bv[j], sum[r * kCols + j]);
    }
  }
  if (i < n) {
    TWINSPARK_UNROLL
    for (int j = 0; j < kCols; ++j) {
      const VF bv = LoadTail(d, b[j] + i, n - i);
      TWINSPARK_UNROLL
      for (int r = 0; r < kRows; ++r) {
        sum[r * kCols + j] = hn::MulAdd(LoadTail(d, a[r] + i, n - i), bv, sum[r * kCols + j]);
      }
    }
  }
  HWY_ALIGN float sums[kPadded];
  TWINSPARK_UNROLL
  for (int s = 0; s < kPadded; s += kVectorLanes)
    hn::Store(ReduceTree<kVectorLanes>(d, sum + s), d, sums + s);
  TWINSPARK_UNROLL
  for (int r = 0; r < kRows; ++r) {
    TWINSPARK_UNROLL
    for (int j = 0; j < kCols; ++j)
      out[r * out_stride + j] = sums[r * kCols + j];
  }
}

// The same for any number of rows and columns. a and b give the r-th and j-th pointer.
template <class A, class B>
HWY_INLINE void DotBlock(const A& a,
                         int64_t num_rows,
                         const B& b,
                         int64_t num_cols,
                         int64_t n,
                         float* HWY_RESTRICT out,
                         int64_t out_stride) {
  constexpr int kRows = 4;
  constexpr int kCols = hn::MaxLanes(DF()) >= 16 ? 4 : 2;  // 16 or 8 accumulators
  using PA = decltype(a(0));
  using PB = decltype(b(0));
  for (int64_t j = 0; j < num_cols; j += kCols) {
    const bool full_cols = j + kCols <= num_cols;
    PB bp[kCols];
    for (int c = 0; c < kCols; ++c)
      bp[c] = b(std::min(j + c, num_cols - 1));
    int64_t r = 0;
    for (; r + kRows <= num_rows && full_cols; r += kRows) {
      PA ap[kRows];
      for (int c = 0; c < kRows; ++c)
        ap[c] = a(r + c);
      DotTile<kRows, kCols>(ap, bp, n, out + r * out_stride + j, out_stride);
    }
    for (; r < num_rows; ++r) {
      PA ap[1] = {a(r)};
      if (full_cols) {
        DotTile<1, kCols>(ap, bp, n, out + r * out_stride + j, out_stride);
      } else {
        for (int64_t c = 0; c < num_cols - j; ++c) {
          DotTile<1, 1>(ap, bp + c, n, out + r * out_stride + j + c, out_stride);
        }
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
