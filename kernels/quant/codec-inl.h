// Packing and unpacking of one stored row, once per SIMD target: used by the store and load ops and
// by the ops that read keys from the caches. Small floats are decoded through f16, whose wider
// exponent holds them exactly (subnormals included) and whose conversion is one instruction.

// clang-format off
#if defined(TWINSPARK_KERNELS_QUANT_CODEC_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWINSPARK_KERNELS_QUANT_CODEC_INL_H_
#undef TWINSPARK_KERNELS_QUANT_CODEC_INL_H_
#else
#define TWINSPARK_KERNELS_QUANT_CODEC_INL_H_
#endif
// clang-format on

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/dtype.h"
#include "kernels/quant/cache_format.h"
#include "kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {

// The two code formats: mantissa bits, exponent bias, largest value.
struct E4M3 {
  static constexpr int kMantissa = 3;
  static constexpr int kBias = 7;
  static constexpr float kMax = 448.0f;
  static constexpr uint32_t kSignBit = 0x80;
};
struct E2M1 {
  static constexpr int kMantissa = 1;
  static constexpr int kBias = 1;
  static constexpr float kMax = 6.0f;
  static constexpr uint32_t kSignBit = 0x08;
};

// Codes of y, |y| <= kMax, ties to the even code, as u32 lanes.
template <class F>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<DF>> EncodeSmall(DF d, VF y) {
  const hn::RebindToUnsigned<DF> du;
  constexpr int kShift = 23 - F::kMantissa;
  const VF magnitude = hn::Abs(y);
  const auto bits = hn::BitCast(du, magnitude);
  const auto odd = hn::And(hn::ShiftRight<kShift>(bits), hn::Set(du, 1u));
  // Half a step, rounded to even, and the other bias.
  constexpr uint32_t kRound =
      (1u << (kShift - 1)) - 1u - (static_cast<uint32_t>(127 - F::kBias) << 23);
  const auto normal = hn::ShiftRight<kShift>(hn::Add(hn::Add(bits, hn::Set(du, kRound)), odd));
  // Below the smallest normal number: adding 2^23 steps leaves the number of steps in the low bits.
  const float steps =
      std::bit_cast<float>(static_cast<uint32_t>(127 + 24 - F::kBias - F::kMantissa) << 23);
  const auto subnormal =
      hn::And(hn::BitCast(du, hn::Add(magnitude, hn::Set(d, steps))), hn::Set(du, 0xffu));
  const float smallest = std::bit_cast<float>(static_cast<uint32_t>(127 + 1 - F::kBias) << 23);
  const auto is_subnormal = hn::RebindMask(du, hn::Lt(magnitude, hn::Set(d, smallest)));
  const auto code = hn::IfThenElse(is_subnormal, subnormal, normal);
  constexpr int kSignShift = F::kSignBit == 0x80 ? 31 - 7 : 31 - 3;
  const auto sign = hn::And(hn::BitCast(du, y), hn::Set(du, 0x80000000u));
  return hn::Or(code, hn::ShiftRight<kSignShift>(sign));
}

// Values of Lanes(d) e4m3 codes divided by 2^8: the code's exponent and mantissa moved to their
// place in an f16 (whose bias is larger by 8), the sign, extended by the widening, to its top bit.
HWY_INLINE VF DecodeE4M3(DF d, const uint8_t* codes) {
  const hn::Rebind<int8_t, DF> d8;
  const hn::Rebind<uint16_t, DF> d16;
  const hn::Rebind<int16_t, DF> di16;
  const hn::Rebind<hwy::float16_t, DF> df16;
  const auto wide = hn::PromoteTo(di16, hn::LoadU(d8, reinterpret_cast<const int8_t*>(codes)));
  const auto moved = hn::BitCast(d16, hn::ShiftLeft<7>(wide));
  const auto half = hn::And(moved, hn::Set(d16, static_cast<uint16_t>(0xbfff)));
  return hn::PromoteTo(d, hn::BitCast(df16, half));
}

// Upper bytes of the f16 forms of all e2m1 codes (the lower bytes are 0).
constexpr uint8_t kE2M1Half[16] = {0x00, 0x38, 0x3c, 0x3e, 0x40, 0x42, 0x44, 0x46,
                                   0x80, 0xb8, 0xbc, 0xbe, 0xc0, 0xc2, 0xc4, 0xc6};

// Values of Lanes(d) such upper bytes.
HWY_INLINE VF DecodeHalf(DF d, const uint8_t* upper_bytes) {
  const hn::Rebind<uint8_t, DF> d8;
  const hn::Rebind<uint16_t, DF> d16;
  const hn::Rebind<hwy::float16_t, DF> df16;
  const auto half = hn::ShiftLeft<8>(hn::PromoteTo(d16, hn::LoadU(d8, upper_bytes)));
  return hn::PromoteTo(d, hn::BitCast(df16, half));
}

inline constexpr int64_t kScalesAtOnce = 16;  // whole vectors of every width up to 16 lanes

// Scales of up to kScalesAtOnce groups: the stored byte, what values are divided by, and its
// reciprocal where that is exact (powers of two: all but Q4e4).
struct GroupScales {
  HWY_ALIGN float scale[kScalesAtOnce];
  HWY_ALIGN float reciprocal[kScalesAtOnce];
  uint8_t bytes[kScalesAtOnce];
};

// `largest`: the groups' largest magnitudes, `count` of them and zeros.
HWY_INLINE void ScalesOf(CacheFormat format, const float* largest, int64_t count, GroupScales& s) {
  const DF d;
  const hn::RebindToUnsigned<DF> du;
  const hn::RebindToSigned<DF> di;
  const hn::Rebind<uint8_t, DF> d8;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t i = 0; i < count; i += lanes) {
    const VF m = hn::Load(d, largest + i);
    if (format == CacheFormat::kQ4E4) {
      const VF ratio = hn::Div(hn::Max(m, hn::Set(d, 6.0f * 0x1p-9f)), hn::Set(d, 6.0f));
      const auto code = EncodeSmall<E4M3>(d, hn::Min(ratio, hn::Set(d, E4M3::kMax)));
      hn::StoreU(hn::DemoteTo(d8, hn::BitCast(di, code)), d8, s.bytes + i);
      hn::Store(hn::Mul(DecodeE4M3(d, s.bytes + i), hn::Set(d, 256.0f)), d, s.scale + i);
      continue;
    }
    // 2^ceil(log2 t), t normal, as an e8m0 byte.
    const bool q8 = format == CacheFormat::kQ8;
    const VF t = hn::Mul(hn::Max(m, hn::Set(d, q8 ? 1e-4f : 6.0f * 0x1p-126f)),
                         hn::Set(d, q8 ? 1.0f / 448.0f : 1.0f / 6.0f));
    const auto up = hn::Add(hn::BitCast(du, t), hn::Set(du, 0x7fffffu));
    const auto byte = hn::Min(hn::ShiftRight<23>(up), hn::Set(du, 254u));
    hn::StoreU(hn::DemoteTo(d8, hn::BitCast(di, byte)), d8, s.bytes + i);
    hn::Store(hn::BitCast(d, hn::ShiftLeft<23>(byte)), d, s.scale + i);
    const auto inverse = hn::ShiftLeft<23>(hn::Sub(hn::Set(du, 254u), byte));
    const auto smallest = hn::Set(du, 1u << 22);  // 2^-127, below the normal numbers
    hn::Store(hn::BitCast(d, hn::Max(inverse, smallest)), d, s.reciprocal + i);
  }
}

template <class T>
HWY_INLINE VF LargestLanes(const T* x, int group) {
  const DF d;
  const int lanes = static_cast<int>(hn::Lanes(d));  // divides 16
  VF largest = hn::Abs(LoadF32(d, x));
  for (int i = lanes; i < group; i += lanes)
    largest = hn::Max(largest, hn::Abs(LoadF32(d, x + i)));
  return largest;
}
// Largest magnitudes of `count` groups. Four groups share the shuffles.
template <class T>
HWY_INLINE void LargestOf(const T* x, int group, int64_t count, float* HWY_RESTRICT largest) {
  const DF d;
  int64_t g = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::Repartition<uint64_t, DF> d64;
  const hn::CappedTag<float, 4> d4;
  for (; g + 4 <= count; g += 4) {
    const T* from = x + g * group;
    const VF a = LargestLanes(from, group), b = LargestLanes(from + group, group);
    const VF c = LargestLanes(from + 2 * group, group), e = LargestLanes(from + 3 * group, group);
    const auto ab =
        hn::BitCast(d64, hn::Max(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b)));
    const auto ce =
        hn::BitCast(d64, hn::Max(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e)));
    VF v = hn::Max(hn::BitCast(d, hn::InterleaveLower(d64, ab, ce)),
                   hn::BitCast(d, hn::InterleaveUpper(d64, ab, ce)));
    if constexpr (hn::MaxLanes(DF()) >= 8) v = hn::Max(v, hn::SwapAdjacentBlocks(v));
    if constexpr (hn::MaxLanes(DF()) >= 16) v = hn::Max(v, hn::ConcatLowerUpper(d, v, v));
    HWY_ALIGN float lanes[hn::MaxLanes(DF())];
    hn::Store(v, d, lanes);
    hn::StoreU(hn::Load(d4, lanes), d4, largest + g);
  }
#endif
  for (; g < count; ++g)
    largest[g] = hn::GetLane(hn::MaxOfLanes(d, LargestLanes(x + g * group, group)));
}

// Stores the codes of a vector: a byte each, or two to a byte, the first one low.
template <class F>
HWY_INLINE void StoreCodes([[maybe_unused]] DF d,
                           hn::Vec<hn::RebindToUnsigned<DF>> codes,
                           uint8_t* to) {
  [[maybe_unused]] const hn::RebindToSigned<DF> di;
  [[maybe_unused]] const hn::Rebind<uint8_t, DF> d8;
  if constexpr (F::kSignBit == E4M3::kSignBit) {
#if HWY_TARGET <= HWY_AVX3
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(codes.raw));
#else
    hn::StoreU(hn::DemoteTo(d8, hn::BitCast(di, codes)), d8, to);
#endif
  } else {
#if HWY_TARGET == HWY_SCALAR
    to[0] = static_cast<uint8_t>(hn::GetLane(codes));
#elif HWY_TARGET <= HWY_AVX3
    const __m512i joined = _mm512_or_si512(codes.raw, _mm512_srli_epi64(codes.raw, 28));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm512_cvtepi64_epi8(joined));
#else
    const hn::Repartition<uint64_t, DF> d64;
    const hn::Rebind<uint8_t, decltype(d64)> d8_half;
    const auto pairs = hn::BitCast(d64, codes);
    const auto joined = hn::Or(pairs, hn::ShiftRight<28>(pairs));
    hn::StoreU(hn::TruncateTo(d8_half, joined), d8_half, to);
#endif
  }
}

// What is stored of a vector of a group, before it is packed.
template <class F, class T>
HWY_INLINE hn::Vec<hn::RebindToUnsigned<DF>> EncodeVector(CacheFormat format,
                                                          const T* x,
                                                          VF divisor,
                                                          VF factor) {
  const DF d;
  const VF value = LoadF32(d, x);
  const VF scaled = format == CacheFormat::kQ4E4 ? hn::Div(value, divisor) : hn::Mul(value, factor);
  return EncodeSmall<F>(d, hn::Min(hn::Max(scaled, hn::Set(d, -F::kMax)), hn::Set(d, F::kMax)));
}

#if HWY_TARGET == HWY_AVX2
// 32 codes of one group or of two, whose scales are given: narrowed to bytes, of which each two are
// joined where codes have four bits.
template <class F, class T>
HWY_INLINE void Encode32(CacheFormat format,
                         const T* x,
                         const float* scale,
                         const float* reciprocal,
                         int step,
                         uint8_t* dst) {
  const DF d;
  const VF divisor0 = hn::Set(d, scale[0]), factor0 = hn::Set(d, reciprocal[0]);
  const VF divisor1 = hn::Set(d, scale[step]), factor1 = hn::Set(d, reciprocal[step]);
  const __m256i low = _mm256_packus_epi32(EncodeVector<F>(format, x, divisor0, factor0).raw,
                                          EncodeVector<F>(format, x + 8, divisor0, factor0).raw);
  const __m256i high = _mm256_packus_epi32(EncodeVector<F>(format, x + 16, divisor1, factor1).raw,
                                           EncodeVector<F>(format, x + 24, divisor1, factor1).raw);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high),
                                                    _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  if constexpr (F::kSignBit != E4M3::kSignBit) {
    const __m256i joined = _mm256_maddubs_epi16(bytes, _mm256_set1_epi16(0x1001));
    const __m128i packed =
        _mm_packus_epi16(_mm256_castsi256_si128(joined), _mm256_extracti128_si256(joined, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(dst), packed);
  } else {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst), bytes);
  }
}
#endif

template <class F, class T>
HWY_INLINE void EncodeGroup(
    CacheFormat format, const T* x, int group, float scale, float reciprocal, uint8_t* dst) {
  const DF d;
  const int lanes = static_cast<int>(hn::Lanes(d));
  const VF divisor = hn::Set(d, scale), factor = hn::Set(d, reciprocal);
  constexpr bool kPacked = F::kSignBit != E4M3::kSignBit;
  constexpr int kPerByte = !kPacked || hn::MaxLanes(DF()) == 1 ? 1 : 2;
  HWY_ALIGN uint8_t codes[32];  // one lane: packed afterwards
  uint8_t* to = kPacked && kPerByte == 1 ? codes : dst;
  for (int i = 0; i < group; i += lanes)
    StoreCodes<F>(d, EncodeVector<F>(format, x + i, divisor, factor), to + i / kPerByte);
  for (int i = 0; to == codes && i < group / 2; ++i)
    dst[i] = static_cast<uint8_t>(codes[2 * i] | (codes[2 * i + 1] << 4));
}

// The codes of `count` groups.
template <class T>
HWY_INLINE void EncodeGroups(CacheFormat format,
                             const T* x,
                             int64_t count,
                             const float* scale,
                             const float* reciprocal,
                             uint8_t* dst) {
  int64_t g = 0;
#if HWY_TARGET == HWY_AVX2
  if (format == CacheFormat::kQ4E4) {
    for (; g + 2 <= count; g += 2)
      Encode32<E2M1>(CacheFormat::kQ4E4, x + g * 16, scale + g, reciprocal + g, 1, dst + g * 8);
  } else if (format == CacheFormat::kQ4E8) {
    for (; g < count; ++g)
      Encode32<E2M1>(CacheFormat::kQ4E8, x + g * 32, scale + g, reciprocal + g, 0, dst + g * 16);
  } else {
    for (; g < count; ++g)
      Encode32<E4M3>(CacheFormat::kQ8, x + g * 32, scale + g, reciprocal + g, 0, dst + g * 32);
  }
#endif
  for (; g < count; ++g) {
    switch (format) {  // the length of a group is a number where it is unrolled
      case CacheFormat::kQ8:
        EncodeGroup<E4M3>(CacheFormat::kQ8, x + g * 32, 32, scale[g], reciprocal[g], dst + g * 32);
        break;
      case CacheFormat::kQ4E8:
        EncodeGroup<E2M1>(CacheFormat::kQ4E8, x + g * 32, 32, scale[g], reciprocal[g],
                          dst + g * 16);
        break;
      default:
        EncodeGroup<E2M1>(CacheFormat::kQ4E4, x + g * 16, 16, scale[g], reciprocal[g], dst + g * 8);
    }
  }
}

template <class T>
HWY_INLINE void EncodeRow(CacheFormat format, const T* x, int64_t n, uint8_t* dst) {
  if (format == CacheFormat::kF32) {
    const DF d;
    HWY_ALIGN float buffer[hn::MaxLanes(DF())];
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
      hn::Store(LoadF32(d, x + i), d, buffer);
      std::memcpy(dst + 4 * i, buffer, sizeof(buffer));
    }
    if (i == n) return;
    hn::Store(LoadTail(d, x + i, n - i), d, buffer);
    std::memcpy(dst + 4 * i, buffer, static_cast<size_t>(n - i) * sizeof(float));
    return;
  }
  const int group = CacheGroup(format);
  const int64_t num_groups = n / group;
  const int64_t num_code_bytes = format == CacheFormat::kQ8 ? n : n / 2;
  uint8_t* scale_bytes = dst + num_code_bytes;
  for (int64_t first = 0; first < num_groups; first += kScalesAtOnce) {
    const int64_t count = std::min(kScalesAtOnce, num_groups - first);
    HWY_ALIGN float largest[kScalesAtOnce];
    GroupScales scales;
    std::fill(largest + count / 4 * 4, largest + kScalesAtOnce, 0.0f);
    LargestOf(x + first * group, group, count, largest);
    ScalesOf(format, largest, count, scales);
    std::copy_n(scales.bytes, count, scale_bytes + first);
    EncodeGroups(format, x + first * group, count, scales.scale, scales.reciprocal,
                 dst + first * group * num_code_bytes / n);
  }
}

// Several short rows, whose scales are computed together: num_rows times the groups of a row are
// kScalesAtOnce.
template <class T>
HWY_INLINE void EncodeShortRows(
    CacheFormat format, const T* const* x, int64_t num_rows, int64_t n, uint8_t* const* dst) {
  const int group = CacheGroup(format);
  const int64_t num_groups = n / group;
  const int64_t num_code_bytes = format == CacheFormat::kQ8 ? n : n / 2;
  HWY_ALIGN float largest[kScalesAtOnce];
  GroupScales scales;
  for (int64_t r = 0; r < num_rows; ++r)
    LargestOf(x[r], group, num_groups, largest + r * num_groups);
  ScalesOf(format, largest, kScalesAtOnce, scales);
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t first = r * num_groups;
    std::copy_n(scales.bytes + first, num_groups, dst[r] + num_code_bytes);
    EncodeGroups(format, x[r], num_groups, scales.scale + first, scales.reciprocal + first, dst[r]);
  }
}

HWY_INLINE float E8M0Scale(uint32_t byte) {
  return std::bit_cast<float>(byte << 23);  // byte >= 1 in everything that EncodeRow writes
}
// Positive e4m3 code: 2^(exponent - 7) * (1 + mantissa / 8), or steps of 2^-9 below.
HWY_INLINE float E4M3Scale(uint8_t code) {
  const int32_t mantissa = code & 7;
  const float normal = std::bit_cast<float>((static_cast<uint32_t>(code) << 20) +
                                            (static_cast<uint32_t>(120) << 23));
  return code >= 8 ? normal : static_cast<float>(mantissa) * 0x1p-9f;
}

// Scales of `count` <= kScalesAtOnce groups as f32, each times `factor` where that is exact.
HWY_INLINE void DecodeScales(CacheFormat format,
                             const uint8_t* bytes,
                             int64_t count,
                             float factor,
                             float* HWY_RESTRICT scales) {
  const bool is_q4e4 = format == CacheFormat::kQ4E4;
  if (count < kScalesAtOnce) {
    for (int64_t g = 0; g < count; ++g)
      scales[g] = (is_q4e4 ? E4M3Scale(bytes[g]) : E8M0Scale(bytes[g])) * factor;
    return;
  }
  const DF d;
  const hn::RebindToUnsigned<DF> du;
  const hn::Rebind<uint8_t, DF> d8;
  const VF by = hn::Set(d, is_q4e4 ? 256.0f * factor : factor);
  for (int64_t i = 0; i < kScalesAtOnce; i += static_cast<int64_t>(hn::Lanes(d))) {
    const VF scale =
        is_q4e4 ? DecodeE4M3(d, bytes + i)
                : hn::BitCast(d, hn::ShiftLeft<23>(hn::PromoteTo(du, hn::LoadU(d8, bytes + i))));
    hn::Store(hn::Mul(scale, by), d, scales + i);
  }
}

// Values of Lanes(d) e2m1 codes at `packed` (low nibble first) times a scale. Where lanes can be
// looked up by number, each lane shifts its nibble down and takes the product from a table made
// once per group; elsewhere nibbles become upper bytes of f16.
#if HWY_TARGET <= HWY_AVX3
using E2M1Table = VF;  // the 16 products
HWY_INLINE E2M1Table MakeE2M1Table(DF d, VF scale) {
  alignas(64) static constexpr float kValues[16] = {0,    0.5f,  1,  1.5f,  2,  3,  4,  6,
                                                    -0.f, -0.5f, -1, -1.5f, -2, -3, -4, -6};
  return hn::Mul(hn::Load(d, kValues), scale);
}
HWY_INLINE VF DecodeE2M1([[maybe_unused]] DF d, const uint8_t* packed, E2M1Table table) {
  const hn::RebindToUnsigned<DF> du;
  alignas(64) static constexpr uint32_t kWord[16] = {0, 0, 0, 0, 0, 0, 0, 0,
                                                     1, 1, 1, 1, 1, 1, 1, 1};
  alignas(64) static constexpr uint32_t kShift[16] = {0, 4, 8, 12, 16, 20, 24, 28,
                                                      0, 4, 8, 12, 16, 20, 24, 28};
  uint64_t codes;
  std::memcpy(&codes, packed, sizeof(codes));
  const auto both = _mm512_set1_epi64(static_cast<int64_t>(codes));
  const auto words = _mm512_permutexvar_epi32(hn::Load(du, kWord).raw, both);
  const auto nibbles = _mm512_srlv_epi32(words, hn::Load(du, kShift).raw);
  return VF{_mm512_permutexvar_ps(nibbles, table.raw)};  // the upper bits of an index do not count
}
// Values of the codes in the lowest four bits of each lane.
HWY_INLINE VF LookUpE2M1(DF d, hn::Vec<hn::RebindToUnsigned<DF>> nibbles) {
  return VF{_mm512_permutexvar_ps(nibbles.raw, MakeE2M1Table(d, hn::Set(d, 1.0f)).raw)};
}
#elif HWY_TARGET == HWY_AVX2
using E2M1Table = VF;  // the 8 products without sign
HWY_INLINE E2M1Table MakeE2M1Table(DF d, VF scale) {
  alignas(32) static constexpr float kValues[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return hn::Mul(hn::Load(d, kValues), scale);
}
HWY_INLINE VF DecodeE2M1(DF d, const uint8_t* packed, E2M1Table table) {
  const hn::RebindToUnsigned<DF> du;
  alignas(32) static constexpr uint32_t kShift[8] = {0, 4, 8, 12, 16, 20, 24, 28};
  alignas(32) static constexpr uint32_t kSignShift[8] = {28, 24, 20, 16, 12, 8, 4, 0};
  uint32_t codes;
  std::memcpy(&codes, packed, sizeof(codes));
  const auto word = hn::Set(du, codes);
  const auto nibbles = _mm256_srlv_epi32(word.raw, hn::Load(du, kShift).raw);
  const VF magnitude{_mm256_permutevar8x32_ps(table.raw, nibbles)};
  const auto sign = hn::And(hn::Shl(word, hn::Load(du, kSignShift)), hn::Set(du, 0x80000000u));
  return hn::Xor(magnitude, hn::BitCast(d, sign));
}
// Values of the codes in the lowest four bits of each lane.
HWY_INLINE VF LookUpE2M1(DF d, hn::Vec<hn::RebindToUnsigned<DF>> nibbles) {
  const hn::RebindToUnsigned<DF> du;
  const VF table = MakeE2M1Table(d, hn::Set(d, 1.0f));
  const VF magnitude{_mm256_permutevar8x32_ps(table.raw, nibbles.raw)};
  const auto sign = hn::And(hn::ShiftLeft<28>(nibbles), hn::Set(du, 0x80000000u));
  return hn::Xor(magnitude, hn::BitCast(d, sign));
}
#endif

// f16 upper bytes of the 32 codes in 16 bytes (or 16 in 8), low nibble first.
HWY_INLINE void UnpackNibbles(const uint8_t* packed, int64_t group, uint8_t* halves) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t i = 0; i < group; ++i) {
    halves[i] = kE2M1Half[(packed[i / 2] >> (4 * (i % 2))) & 0x0f];
  }
#else
  const hn::FixedTag<uint8_t, 16> d8;
  const hn::FixedTag<uint16_t, 8> d16;
  const hn::FixedTag<uint64_t, 2> d64;
  const auto mask = hn::Set(d8, static_cast<uint8_t>(0x0f));
  const auto table = hn::LoadU(d8, kE2M1Half);
  auto bytes = hn::Zero(d8);
  if (group == 32) {
    bytes = hn::LoadU(d8, packed);
  } else {
    uint64_t half;
    std::memcpy(&half, packed, sizeof(half));
    bytes = hn::BitCast(d8, hn::Set(d64, half));
  }
  const auto low = hn::And(bytes, mask);
  const auto high = hn::And(hn::BitCast(d8, hn::ShiftRight<4>(hn::BitCast(d16, bytes))), mask);
  const auto first = hn::InterleaveLower(d8, low, high);
  hn::StoreU(hn::TableLookupBytes(table, first), d8, halves);
  if (group != 32) return;
  const auto second = hn::InterleaveUpper(d8, low, high);
  hn::StoreU(hn::TableLookupBytes(table, second), d8, halves + 16);
#endif
}

// Groups of four-bit codes whose scales are scales[0 .. count).
template <int kGroup, class T>
HWY_INLINE void DecodeFourBit(const uint8_t* packed, const float* scales, int64_t count, T* out) {
  const DF d;
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(DF()));
  for (int64_t g = 0; g < count; ++g) {
    const VF scale = hn::Set(d, scales[g]);
    const uint8_t* from = packed + g * (kGroup / 2);
    T* to = out + g * kGroup;
#if HWY_TARGET <= HWY_AVX2
    const E2M1Table table = MakeE2M1Table(d, scale);
    TWINSPARK_UNROLL
    for (int i = 0; i < kGroup; i += kLanes)
      StoreF32(DecodeE2M1(d, from + i / 2, table), d, to + i);
#else
    HWY_ALIGN uint8_t halves[32];
    UnpackNibbles(from, kGroup, halves);
    for (int i = 0; i < kGroup; i += kLanes)
      StoreF32(hn::Mul(DecodeHalf(d, halves + i), scale), d, to + i);
#endif
  }
}

// Groups of e4m3 codes with scales of powers of two.
template <int kGroup, class T>
HWY_INLINE void DecodeEightBit(const uint8_t* codes,
                               const uint8_t* scale_bytes,
                               int64_t count,
                               T* out) {
  constexpr uint8_t kLargestFolded = 127 + 100;  // beyond it 2^8 times the scale could overflow
  constexpr int kLanes = static_cast<int>(hn::MaxLanes(DF()));
  const DF d;
  uint8_t largest = 0;
  for (int64_t g = 0; g < count; ++g)
    largest = std::max(largest, scale_bytes[g]);
  const bool folded = largest <= kLargestFolded;
  HWY_ALIGN float scales[kScalesAtOnce];
  DecodeScales(CacheFormat::kQ8, scale_bytes, count, folded ? 256.0f : 1.0f, scales);
  const VF rebias = hn::Set(d, folded ? 1.0f : 256.0f);
  for (int64_t g = 0; g < count; ++g) {
    const VF factor = hn::Set(d, scales[g]);
    TWINSPARK_UNROLL
    for (int i = 0; i < kGroup; i += kLanes) {
      VF value = DecodeE4M3(d, codes + g * kGroup + i);
      if (!folded) value = hn::Mul(value, rebias);
      StoreF32(hn::Mul(value, factor), d, out + g * kGroup + i);
    }
  }
}

// A packed row in groups of kGroup.
template <int kGroup, class T>
HWY_INLINE void DecodeGroups(CacheFormat format, const uint8_t* src, int64_t n, T* out) {
  const int64_t num_groups = n / kGroup;
  const bool is_q8 = format == CacheFormat::kQ8;
  const uint8_t* scale_bytes = src + (is_q8 ? n : n / 2);
  for (int64_t g = 0; g < num_groups; g += kScalesAtOnce) {
    const int64_t count = std::min(kScalesAtOnce, num_groups - g);
    if (is_q8) {
      DecodeEightBit<kGroup>(src + g * kGroup, scale_bytes + g, count, out + g * kGroup);
      continue;
    }
    HWY_ALIGN float scales[kScalesAtOnce];
    DecodeScales(format, scale_bytes + g, count, 1.0f, scales);
    DecodeFourBit<kGroup>(src + g * (kGroup / 2), scales, count, out + g * kGroup);
  }
}

template <class T>
HWY_INLINE void DecodeRow(CacheFormat format, const uint8_t* src, int64_t n, T* out) {
  const DF d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  if (format == CacheFormat::kF32) {
    HWY_ALIGN float buffer[hn::MaxLanes(DF())] = {};
    int64_t i = 0;
    for (; i + lanes <= n; i += lanes) {
      std::memcpy(buffer, src + 4 * i, sizeof(buffer));
      StoreF32(hn::Load(d, buffer), d, out + i);
    }
    if (i == n) return;
    CheckTail(n - i);
    std::memcpy(buffer, src + 4 * i, static_cast<size_t>(n - i) * sizeof(float));
    StoreTail(hn::Load(d, buffer), d, out + i, n - i);
    return;
  }
  if (format == CacheFormat::kQ4E4) {
    DecodeGroups<16>(format, src, n, out);
  } else {
    DecodeGroups<32>(format, src, n, out);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
