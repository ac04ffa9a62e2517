// What the Highway code of several ops shares, once per SIMD target: loads and stores that convert
// (bf16 rounds to nearest even at the store), tails, and sums of lanes in one fixed order.
// ReduceTree gives every output the same association whatever it is computed together with, which
// is what makes rows independent of how many are computed together (see also dot-inl.h).

// clang-format off
#if defined(TWINSPARK_KERNELS_VEC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWINSPARK_KERNELS_VEC_INL_H_
#undef TWINSPARK_KERNELS_VEC_INL_H_
#else
#define TWINSPARK_KERNELS_VEC_INL_H_
#endif
// clang-format on

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>
#include <type_traits>

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

// Two vectors of a row that are loaded, computed and stored together, which halves what narrowing
// costs. Either neighbours, or (kWords: bf16 only) the first and the second values of all pairs: on
// a little-endian machine the lower and the upper half of a word, so neither way needs a shuffle.
struct Two {
  VF a, b;
};
template <class... T>
inline constexpr bool kAllWords = HWY_TARGET != HWY_SCALAR&& std::endian::native ==
                                      std::endian::little &&
                                  (std::is_same_v<T, Bf16> && ...);

template <bool kWords, class T>
HWY_INLINE Two LoadTwo(DF d, const T* p) {
  if constexpr (kWords) {
    static_assert(std::is_same_v<T, Bf16>);
    const hn::RebindToUnsigned<DF> du;
    const auto words = hn::LoadU(du, reinterpret_cast<const uint32_t*>(p));
    return {hn::BitCast(d, hn::ShiftLeft<16>(words)),
            hn::BitCast(d, hn::And(words, hn::Set(du, 0xffff0000u)))};
  } else {
    return {LoadF32(d, p), LoadF32(d, p + hn::Lanes(d))};
  }
}

// Is there a NaN in one of them?
HWY_INLINE bool AnyNaN([[maybe_unused]] DF d, Two v) {
#if HWY_TARGET == HWY_AVX2
  return _mm256_movemask_ps(_mm256_cmp_ps(v.a.raw, v.b.raw, _CMP_UNORD_Q)) != 0;
#elif HWY_TARGET <= HWY_AVX3
  return _mm512_cmp_ps_mask(v.a.raw, v.b.raw, _CMP_UNORD_Q) != 0;
#else
  return !(hn::AllFalse(d, hn::IsNaN(v.a)) && hn::AllFalse(d, hn::IsNaN(v.b)));
#endif
}

template <bool kWords, class T>
HWY_INLINE void StoreTwo(Two v, DF d, T* p) {
#if HWY_TARGET != HWY_SCALAR
  if constexpr (std::is_same_v<T, Bf16>) {
    const hn::RebindToUnsigned<DF> du;
    const hn::Repartition<uint16_t, DF> d16;
    const auto round = [&](VF x) HWY_ATTR {  // the upper half; as RoundToBf16 for all but NaN
      const auto bits = hn::BitCast(du, x);
      const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1u));
      return hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd);
    };
    auto a = round(v.a), b = round(v.b);
    if (HWY_UNLIKELY(AnyNaN(d, v))) {
      a = hn::BitCast(du, RoundToBf16(d, v.a));
      b = hn::BitCast(du, RoundToBf16(d, v.b));
    }
    if constexpr (kWords) {
      const auto low = hn::BitCast(d16, hn::ShiftRight<16>(a));
      hn::StoreU(hn::OddEven(hn::BitCast(d16, b), low), d16, reinterpret_cast<uint16_t*>(p));
    } else {
      hn::StoreU(hn::ConcatOdd(d16, hn::BitCast(d16, b), hn::BitCast(d16, a)), d16,
                 reinterpret_cast<uint16_t*>(p));
    }
    return;
  }
#endif
  StoreF32(v.a, d, p);
  StoreF32(v.b, d, p + hn::Lanes(d));
}

// Keeps a loaded vector in a register: short of registers, GCC would rather read it from memory
// again for every use, and reading is what a multiply-add waits for.
HWY_INLINE VF InRegister(VF v) {
#if HWY_ARCH_X86 && HWY_COMPILER_GCC_ACTUAL
  asm("" : "+v"(v.raw));
#endif
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

// out[i] = value(load) for a row of n values, load(p) as in ForVectors: for what has one result.
// kWords: everything that is loaded and stored is bf16, and value() works lane by lane.
template <bool kWords, class Out, class Value>
HWY_INLINE void MapVectors(DF d, int64_t n, Out* out, const Value& value) {
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t i = 0;
  for (; i + 2 * lanes <= n; i += 2 * lanes) {
    const VF a = value([&](const auto* p) HWY_ATTR { return LoadTwo<kWords>(d, p + i).a; });
    const VF b = value([&](const auto* p) HWY_ATTR { return LoadTwo<kWords>(d, p + i).b; });
    StoreTwo<kWords>({a, b}, d, out + i);
  }
  for (; i + lanes <= n; i += lanes)
    StoreF32(value([&](const auto* p) HWY_ATTR { return LoadF32(d, p + i); }), d, out + i);
  if (i == n) return;
  StoreTail(value([&](const auto* p) HWY_ATTR { return LoadTail(d, p + i, n - i); }), d, out + i,
            n - i);
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

// Sum of all lanes: neighbours first, in the association of ReduceTree. Every lane gets the sum of
// its pair, its four, its eight: shuffles within 128 bits take a third of the time of others.
HWY_INLINE float ReduceLanes([[maybe_unused]] DF d, VF v) {
#if HWY_TARGET != HWY_SCALAR
  v = hn::Add(v, hn::Shuffle2301(v));
  v = hn::Add(v, hn::Shuffle1032(v));
  if constexpr (hn::MaxLanes(DF()) >= 8) v = hn::Add(v, hn::SwapAdjacentBlocks(v));
  if constexpr (hn::MaxLanes(DF()) >= 16) v = hn::Add(v, hn::ConcatLowerUpper(d, v, v));
#endif
  return hn::GetLane(v);
}

// Lane i of the result is ReduceLanes(tile[i]) for i < kCount, with shared shuffles; kCount: a
// power of two, at most the number of lanes.
template <int kCount>
HWY_INLINE VF ReduceLevels(DF d, const VF* tile) {
  if constexpr (kCount == 1) {
    return tile[0];
  } else {
    return SumNeighbours(d, ReduceLevels<kCount / 2>(d, tile + kCount / 2),
                         ReduceLevels<kCount / 2>(d, tile));
  }
}
template <int kCount>
HWY_INLINE VF ReduceTree(DF d, const VF* tile) {
#if HWY_TARGET == HWY_AVX2
  // Two levels of neighbours within 128 bits, then their halves.
  const auto pairs = [&](VF hi, VF lo) HWY_ATTR { return VF{_mm256_hadd_ps(lo.raw, hi.raw)}; };
  const auto fours = [&](const VF* t, int count) HWY_ATTR {
    const VF low = pairs(t[count > 1 ? 1 : 0], t[0]);
    return pairs(count > 2 ? pairs(t[count > 2 ? 3 : 0], t[count > 2 ? 2 : 0]) : low, low);
  };
  const VF low = fours(tile, kCount);
  const VF high = kCount > 4 ? fours(tile + (kCount > 4 ? 4 : 0), kCount > 4 ? 4 : kCount) : low;
  return hn::Add(hn::ConcatLowerLower(d, high, low), hn::ConcatUpperUpper(d, high, low));
#else
  VF v = ReduceLevels<kCount>(d, tile);
  for (size_t width = hn::Lanes(d) / kCount; width > 1; width /= 2)
    v = SumNeighbours(d, v, v);
  return v;
#endif
}

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
