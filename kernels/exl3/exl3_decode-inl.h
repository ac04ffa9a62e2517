// Decode of EXL3 tiles with Highway: words of the transposed layout (exl3_weights.h) to exact f32
// values, N output columns at a time. Included once per SIMD target; the values are the same on
// all.
//
// Every lane holds one column's stream of `K` words; the word before its first is the last word of
// the lane to its left (the ring). Ring position q ends at bit (q + 1) K of the stream: inside one
// word the state is a constant shift and a mask, across two words it is cut from prev << 16 | w
// >> 16.
#if defined(TWINSPARK_KERNELS_EXL3_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWINSPARK_KERNELS_EXL3_DECODE_INL_H_
#undef TWINSPARK_KERNELS_EXL3_DECODE_INL_H_
#else
#define TWINSPARK_KERNELS_EXL3_DECODE_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/exl3/exl3_weights.h"
#include "kernels/panel_gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Sum of the four bytes of every lane.
HWY_INLINE PanelVU ByteSum(PanelVU x) {
  const PanelU32 du;
#if HWY_TARGET == HWY_SCALAR
  const PanelVU even = hn::Set(du, 0x00ff00ffu);
  const PanelVU sums = hn::Add(hn::And(x, even), hn::And(hn::ShiftRight<8>(x), even));
  return hn::Add(hn::And(sums, hn::Set(du, 0xffffu)), hn::ShiftRight<16>(sums));
#else
  const hn::Repartition<uint16_t, PanelU32> d16;
  const auto x16 = hn::BitCast(d16, x);
  const auto even = hn::And(x16, hn::Set(d16, uint16_t{0xff}));
  const auto odd = hn::ShiftRight<8>(x16);
  const auto pairs = hn::Add(even, odd);
#if HWY_ARCH_X86 && HWY_TARGET != HWY_EMU128
  // On x86 this op adds neighbouring 16-bit lanes, and its second sum stays as it is.
  const hn::Repartition<int16_t, PanelU32> di16;
  const PanelI32 di;
  auto unused = hn::Zero(di);
  return hn::BitCast(du, hn::ReorderWidenMulAccumulate(di, hn::BitCast(di16, pairs),
                                                       hn::Set(di16, 1), hn::Zero(di), unused));
#else
  const PanelVU sums = hn::BitCast(du, pairs);
  return hn::Add(hn::And(sums, hn::Set(du, 0xffffu)), hn::ShiftRight<16>(sums));
#endif
#endif
}

// Section 2.2: RN16((1774 S - 905216) * 2^-18) of up to four vectors of states, in place. The
// argument of RN16 is exact in f32, and t - (t - v) with t = 8193 v rounds it to 11 bits (all
// 65,536 states are tested). The vectors go through the steps side by side: one after the other,
// some 40 cycles of latency each would fill the processor's window with waiting instructions.
template <int kCount>
HWY_INLINE void DecodeMul1(PanelVF& v0, PanelVF& v1, PanelVF& v2, PanelVF& v3) {
  static_assert(kCount >= 1 && kCount <= 4);
  const PanelF32 d;
  const PanelU32 du;
  PanelVU x0 = hn::BitCast(du, v0), x1 = hn::BitCast(du, v1);
  PanelVU x2 = hn::BitCast(du, v2), x3 = hn::BitCast(du, v3);
  const auto each_x = [&](auto step) HWY_ATTR {
    x0 = step(x0);
    if constexpr (kCount > 1) x1 = step(x1);
    if constexpr (kCount > 2) x2 = step(x2);
    if constexpr (kCount > 3) x3 = step(x3);
  };
  each_x([&](PanelVU x) HWY_ATTR { return hn::Mul(x, hn::Set(du, 0x83DCD12Du)); });
  each_x([&](PanelVU x) HWY_ATTR { return ByteSum(x); });
  const auto to_float = [&](PanelVU sum) HWY_ATTR {
#if HWY_NATIVE_FMA
    // 0x4B000000 + S is 2^23 + S as a float; the fused product and sum is exact (22 bits).
    return hn::MulAdd(hn::BitCast(d, hn::Add(sum, hn::Set(du, 0x4B000000u))),
                      hn::Set(d, 1774.0f * 0x1p-18f), hn::Set(d, -(1774.0f * 0x1p5f + 3.453125f)));
#else
    return hn::MulAdd(hn::ConvertTo(d, hn::BitCast(PanelI32(), sum)),
                      hn::Set(d, 1774.0f * 0x1p-18f), hn::Set(d, -3.453125f));
#endif
  };
  v0 = to_float(x0);
  if constexpr (kCount > 1) v1 = to_float(x1);
  if constexpr (kCount > 2) v2 = to_float(x2);
  if constexpr (kCount > 3) v3 = to_float(x3);
  const auto round = [&](PanelVF v) HWY_ATTR {
    const PanelVF t = hn::Mul(v, hn::Set(d, 8193.0f));
    return hn::Sub(t, hn::Sub(t, v));
  };
  v0 = round(v0);
  if constexpr (kCount > 1) v1 = round(v1);
  if constexpr (kCount > 2) v2 = round(v2);
  if constexpr (kCount > 3) v3 = round(v3);
}

// Section 2.1: two f16 numbers with exponents 12..15, so widening is a shift and an addition to the
// exponent; their sum is exact in f32 and is rounded to f16 on the bits (never subnormal).
template <Exl3Codebook kCodebook>
HWY_INLINE PanelVF Decode3Inst(PanelVU states) {
  const PanelF32 d;
  const PanelU32 du;
  PanelVU x = states;
  if constexpr (kCodebook == Exl3Codebook::k3Inst) {
    x = hn::Add(hn::Mul(states, hn::Set(du, 89226354u)), hn::Set(du, 64248484u));
  } else {
    x = hn::Mul(states, hn::Set(du, 0xCBAC1FEDu));
  }
  x = hn::Xor(hn::And(x, hn::Set(du, 0x8FFF8FFFu)), hn::Set(du, 0x3B603B60u));
  const PanelVU sign = hn::Set(du, 0x80000000u);
  const PanelVU magnitude = hn::Set(du, 0x0fffe000u);
  const PanelVU rebias = hn::Set(du, 112u << 23);
  const PanelVU low = hn::Or(hn::And(hn::ShiftLeft<16>(x), sign),
                             hn::Add(hn::And(hn::ShiftLeft<13>(x), magnitude), rebias));
  const PanelVU high =
      hn::Or(hn::And(x, sign), hn::Add(hn::And(hn::ShiftRight<3>(x), magnitude), rebias));
  const PanelVU sum = hn::BitCast(du, hn::Add(hn::BitCast(d, low), hn::BitCast(d, high)));
  const PanelVU odd = hn::And(hn::ShiftRight<13>(sum), hn::Set(du, 1u));
  const PanelVU rounded = hn::Add(hn::Add(sum, hn::Set(du, 0xfffu)), odd);
  return hn::BitCast(d, hn::And(rounded, hn::Set(du, 0xffffe000u)));
}

// The last word of the lane to the left, for lanes `sub * N` .. of a row of 16 (two rings of 8).
HWY_INLINE PanelVU LeftNeighbours(const uint32_t* HWY_RESTRICT last_words, size_t sub) {
  const PanelU32 du;
  const size_t first = sub * kPanelLanes;
#if HWY_TARGET == HWY_SCALAR
  return hn::LoadU(du, last_words + ((first & 8) | ((first + 7) & 7)));
#elif HWY_HAVE_SCALABLE || HWY_MAX_BYTES == 16
  static_assert(kPanelLanes == 4);
  const PanelVU own = hn::LoadU(du, last_words + first);
  const PanelVU other = hn::LoadU(du, last_words + (first ^ 4));
  return hn::CombineShiftRightLanes<3>(du, own, other);
#else
  static_assert(kPanelLanes == 8 || kPanelLanes == 16);
  HWY_ALIGN static constexpr int32_t kLeft[16] = {7,  0, 1, 2,  3,  4,  5,  6,
                                                  15, 8, 9, 10, 11, 12, 13, 14};
  return hn::TableLookupLanes(hn::LoadU(du, last_words + first), hn::SetTableIndices(du, kLeft));
#endif
}

// First ring position that ends in word i (0 .. K) of a lane.
template <int K>
constexpr int FirstInWord(int i) {
  return (32 * i) / K;
}

// Position q of a ring belongs to column half (q >> 2) & 1 and is this step of its tile.
constexpr size_t StepOf(int q) {
  return static_cast<size_t>((q >> 3) * 4 + (q & 3));
}

// Where a decoded vector goes: to a panel [16 steps][2 halves][N], or straight into the product
// with one row of x.
template <bool kMultiply, int q>
HWY_INLINE void PutDecoded(PanelVF value,
                           float* HWY_RESTRICT panel,
                           const float* HWY_RESTRICT x,
                           PanelVF& sum0,
                           PanelVF& sum1) {
  const PanelF32 d;
  constexpr size_t kStep = StepOf(q);
  constexpr size_t kHalf = (q >> 2) & 1;
  if constexpr (kMultiply) {
    PanelVF& sum = kHalf == 0 ? sum0 : sum1;
    sum = hn::MulAdd(hn::Set(d, x[kStep]), value, sum);
  } else {
    hn::StoreU(value, d, panel + (2 * kStep + kHalf) * kPanelLanes);
  }
}

// State of position q, which ends in word i, given that word and the 32 bits that straddle its
// start.
template <int K, int i, int q>
HWY_INLINE PanelVU StateOf(PanelVU word, PanelVU straddling) {
  const PanelVU mask = hn::Set(PanelU32(), 0xffffu);
  constexpr int kEnd = (q + 1) * K - 32 * i;  // 1 .. 32
  if constexpr (kEnd == 16) {
    return hn::ShiftRight<16>(word);
  } else if constexpr (kEnd > 16) {
    return hn::And(hn::ShiftRight<32 - kEnd>(word), mask);
  } else {
    return hn::And(hn::ShiftRight<16 - kEnd>(straddling), mask);
  }
}

// Vectors decoded side by side: as many as the registers hold (32 or 16).
inline constexpr int kSideBySide = kPanelLanes == 16 ? 4 : 2;

// Positions q .. end - 1, which end in word i.
template <int K, bool kMultiply, int i, int q, int end>
HWY_INLINE void DecodeWord(PanelVU word,
                           PanelVU straddling,
                           float* HWY_RESTRICT panel,
                           const float* HWY_RESTRICT x,
                           PanelVF& sum0,
                           PanelVF& sum1) {
  if constexpr (q < end) {
    constexpr int kCount = end - q < kSideBySide ? end - q : kSideBySide;
    constexpr int q1 = kCount > 1 ? q + 1 : q, q2 = kCount > 2 ? q + 2 : q;
    constexpr int q3 = kCount > 3 ? q + 3 : q;
    const PanelF32 d;
    PanelVF v0 = hn::BitCast(d, StateOf<K, i, q>(word, straddling));
    PanelVF v1 = hn::BitCast(d, StateOf<K, i, q1>(word, straddling));
    PanelVF v2 = hn::BitCast(d, StateOf<K, i, q2>(word, straddling));
    PanelVF v3 = hn::BitCast(d, StateOf<K, i, q3>(word, straddling));
    DecodeMul1<kCount>(v0, v1, v2, v3);
    PutDecoded<kMultiply, q>(v0, panel, x, sum0, sum1);
    if constexpr (kCount > 1) PutDecoded<kMultiply, q1>(v1, panel, x, sum0, sum1);
    if constexpr (kCount > 2) PutDecoded<kMultiply, q2>(v2, panel, x, sum0, sum1);
    if constexpr (kCount > 3) PutDecoded<kMultiply, q3>(v3, panel, x, sum0, sum1);
    DecodeWord<K, kMultiply, i, q + kCount, end>(word, straddling, panel, x, sum0, sum1);
  }
}

// Word i of a tile and the ones after it.
template <int K, bool kMultiply, int i>
HWY_INLINE void DecodeWordsFrom(const uint32_t* HWY_RESTRICT own,
                                PanelVU previous,
                                float* HWY_RESTRICT panel,
                                const float* HWY_RESTRICT x,
                                PanelVF& sum0,
                                PanelVF& sum1) {
  if constexpr (i < K) {
    const PanelVU word = hn::LoadU(PanelU32(), own + i * 16);
    const PanelVU straddling = hn::Or(hn::ShiftLeft<16>(previous), hn::ShiftRight<16>(word));
    DecodeWord<K, kMultiply, i, FirstInWord<K>(i), FirstInWord<K>(i + 1)>(word, straddling, panel,
                                                                          x, sum0, sum1);
    DecodeWordsFrom<K, kMultiply, i + 1>(own, word, panel, x, sum0, sum1);
  }
}

// mul1: `num_tiles` tiles down the inputs, to a panel [num_tiles * 16 steps][2][N]. A tile's words
// are words[i * 16 + lane]; `sub` says which N of the 16 lanes.
template <int K>
HWY_NOINLINE void DecodeTiles(const uint32_t* HWY_RESTRICT words,
                              int /*bits*/,
                              size_t sub,
                              size_t num_tiles,
                              float* HWY_RESTRICT panel) {
  PanelVF unused = hn::Zero(PanelF32());
  for (size_t t = 0; t < num_tiles; ++t) {
    const uint32_t* HWY_RESTRICT tile = words + t * (16 * K);
    DecodeWordsFrom<K, false, 0>(tile + sub * kPanelLanes, LeftNeighbours(tile + (K - 1) * 16, sub),
                                 panel + t * (32 * kPanelLanes), nullptr, unused, unused);
  }
}

// mul1: the product of one row, decoded values used where they appear: z0, z1 += x times the tiles.
template <int K>
HWY_NOINLINE void MultiplyTiles(const uint32_t* HWY_RESTRICT words,
                                size_t sub,
                                size_t num_tiles,
                                const float* HWY_RESTRICT x,
                                float* HWY_RESTRICT z0,
                                float* HWY_RESTRICT z1) {
  const PanelF32 d;
  PanelVF sum0 = hn::LoadU(d, z0);
  PanelVF sum1 = hn::LoadU(d, z1);
  for (size_t t = 0; t < num_tiles; ++t) {
    const uint32_t* HWY_RESTRICT tile = words + t * (16 * K);
    DecodeWordsFrom<K, true, 0>(tile + sub * kPanelLanes, LeftNeighbours(tile + (K - 1) * 16, sub),
                                nullptr, x + t * 16, sum0, sum1);
  }
  hn::StoreU(sum0, d, z0);
  hn::StoreU(sum1, d, z1);
}

// 3inst and mcg, which only older packs use: any K with run-time shifts, always to a panel.
template <Exl3Codebook kCodebook>
HWY_NOINLINE void DecodeTilesAnyK(const uint32_t* HWY_RESTRICT words,
                                  int bits,
                                  size_t sub,
                                  size_t num_tiles,
                                  float* HWY_RESTRICT panel) {
  const PanelU32 du;
  const PanelF32 d;
  const PanelVU mask = hn::Set(du, 0xffffu);
  for (size_t t = 0; t < num_tiles; ++t) {
    const uint32_t* HWY_RESTRICT tile = words + t * static_cast<size_t>(16 * bits);
    const uint32_t* HWY_RESTRICT own = tile + sub * kPanelLanes;
    float* HWY_RESTRICT to = panel + t * (32 * kPanelLanes);
    PanelVU previous = LeftNeighbours(tile + (bits - 1) * 16, sub);
    int q = 0;
    for (int i = 0; i < bits; ++i) {
      const PanelVU word = hn::LoadU(du, own + i * 16);
      const PanelVU straddling = hn::Or(hn::ShiftLeft<16>(previous), hn::ShiftRight<16>(word));
      for (; (q + 1) * bits <= 32 * (i + 1); ++q) {
        const int end = (q + 1) * bits - 32 * i;  // 1 .. 32
        const PanelVU shifted = end >= 16 ? hn::ShiftRightSame(word, 32 - end)
                                          : hn::ShiftRightSame(straddling, 16 - end);
        const PanelVF value = Decode3Inst<kCodebook>(hn::And(shifted, mask));
        const size_t half = (static_cast<size_t>(q) >> 2) & 1;
        hn::StoreU(value, d, to + (2 * StepOf(q) + half) * kPanelLanes);
      }
      previous = word;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#endif  // toggle
