// Goal: every conversion is exact or rounds to nearest, ties to even. Method: all codes of the
// narrow formats against their definition in double; every midpoint between neighbours and the f32
// numbers just beside it; random f32 bit patterns against a search over all codes.
#include "kernels/dtype.h"

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include <gtest/gtest.h>

namespace twinspark {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Value of a code with `exponent_bits` and `mantissa_bits`, IEEE-like, as if all codes were finite.
double Value(uint32_t magnitude, int exponent_bits, int mantissa_bits) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = static_cast<int>(magnitude >> mantissa_bits);
  const double mantissa =
      static_cast<double>(magnitude & ((1u << mantissa_bits) - 1)) / (1 << mantissa_bits);
  if (exponent == 0) return std::ldexp(mantissa, 1 - bias);
  return std::ldexp(1.0 + mantissa, exponent - bias);
}

// Around the midpoint of two neighbours (both exact in f32), for both signs: `below` code, the next
// code, and which of them the tie takes (the even one). round(float) gives the code of a number.
template <class Round>
void ExpectMidpoint(uint32_t code, double low, double high, uint32_t sign_bit, Round round) {
  const float middle = static_cast<float>((low + high) / 2);
  ASSERT_EQ(static_cast<double>(middle), (low + high) / 2);
  const uint32_t even = code % 2 == 0 ? code : code + 1;
  ASSERT_EQ(round(middle), even) << middle;
  ASSERT_EQ(round(-middle), even | sign_bit) << -middle;
  ASSERT_EQ(round(std::nextafter(middle, 0.0f)), code);
  ASSERT_EQ(round(std::nextafter(middle, kInfinity)), code + 1);
}

TEST(F16, EveryCodeHasItsValueAndComesBack) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const F16 half = {static_cast<uint16_t>(code)};
    const float value = ToF32(half);
    const uint32_t magnitude = code & 0x7fff;
    if (magnitude > 0x7c00) {
      EXPECT_TRUE(std::isnan(value)) << code;
      EXPECT_TRUE(std::isnan(ToF32(ToF16(value)))) << code;
      continue;
    }
    const double want = magnitude == 0x7c00 ? HUGE_VAL : Value(magnitude, 5, 10);
    ASSERT_EQ(std::abs(static_cast<double>(value)), want) << code;
    ASSERT_EQ(std::signbit(value), (code & 0x8000) != 0) << code;
    ASSERT_EQ(ToF16(value).bits, code);
  }
}

TEST(F16, MidpointsGoToTheEvenCode) {
  const auto round = [](float x) -> uint32_t { return ToF16(x).bits; };
  for (uint32_t code = 0; code < 0x7bff; ++code)
    ExpectMidpoint(code, Value(code, 5, 10), Value(code + 1, 5, 10), 0x8000, round);
  EXPECT_EQ(round(65519.996f), 0x7bffu);
  EXPECT_EQ(round(65520.0f), 0x7c00u);  // halfway to 65536: the even code is infinity
  EXPECT_EQ(round(1e30f), 0x7c00u);
  EXPECT_EQ(round(-kInfinity), 0xfc00u);
  EXPECT_EQ(round(1e-30f), 0u);
  EXPECT_EQ(round(-0.0f), 0x8000u);
}

TEST(Bf16, EveryCodeComesBackAndMidpointsGoToTheEvenCode) {
  for (uint32_t code = 0; code < 65536; ++code) {
    const Bf16 x = {static_cast<uint16_t>(code)};
    const float value = ToF32(x);
    ASSERT_EQ(std::bit_cast<uint32_t>(value), code << 16);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(ToF32(ToBf16(value)))) << code;
      EXPECT_NE(ToBf16(value).bits & 0x40, 0) << "quiet";
    } else {
      ASSERT_EQ(ToBf16(value).bits, code);
    }
  }
  const auto round = [](float x) -> uint32_t { return ToBf16(x).bits; };
  for (uint32_t code = 0; code < 0x7f7f; ++code) {
    const uint32_t middle = code << 16 | 0x8000;
    const uint32_t even = code % 2 == 0 ? code : code + 1;
    ASSERT_EQ(round(std::bit_cast<float>(middle)), even);
    ASSERT_EQ(round(std::bit_cast<float>(middle | 0x80000000u)), even | 0x8000);
    ASSERT_EQ(round(std::bit_cast<float>(middle - 1)), code);
    ASSERT_EQ(round(std::bit_cast<float>(middle + 1)), code + 1);
  }
  EXPECT_EQ(round(std::numeric_limits<float>::max()), 0x7f80u);
  EXPECT_EQ(round(kInfinity), 0x7f80u);
  EXPECT_EQ(RoundBf16(1.00390625f), 1.0f);
}

TEST(E4M3, CodesMidpointsAndSaturation) {
  for (uint32_t code = 0; code < 256; ++code) {
    const float value = E4M3ToF32(static_cast<uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
      continue;
    }
    ASSERT_EQ(std::abs(static_cast<double>(value)), Value(code & 0x7f, 4, 3)) << code;
    ASSERT_EQ(std::signbit(value), code >= 128) << code;
    ASSERT_EQ(F32ToE4M3Saturating(value), code);
  }
  const auto round = [](float x) -> uint32_t { return F32ToE4M3Saturating(x); };
  for (uint32_t code = 0; code < 0x7e; ++code)
    ExpectMidpoint(code, Value(code, 4, 3), Value(code + 1, 4, 3), 0x80, round);
  EXPECT_EQ(round(1e9f), 0x7eu);
  EXPECT_EQ(round(-kInfinity), 0xfeu);
  EXPECT_EQ(round(464.0f), 0x7eu);
  EXPECT_EQ(round(std::numeric_limits<float>::quiet_NaN()) & 0x7f, 0x7fu);
}

TEST(E2M1, CodesMidpointsAndSaturation) {
  constexpr double kValues[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (uint32_t code = 0; code < 16; ++code) {
    const float value = E2M1ToF32(static_cast<uint8_t>(code));
    ASSERT_EQ(std::abs(static_cast<double>(value)), kValues[code & 7]);
    ASSERT_EQ(std::signbit(value), code >= 8);
    ASSERT_EQ(F32ToE2M1Saturating(value), code);
  }
  const auto round = [](float x) -> uint32_t { return F32ToE2M1Saturating(x); };
  for (uint32_t code = 0; code < 7; ++code)
    ExpectMidpoint(code, kValues[code], kValues[code + 1], 8, round);
  EXPECT_EQ(round(1e9f), 7u);
  EXPECT_EQ(round(-kInfinity), 15u);
}

TEST(E8M0, IsAPowerOfTwo) {
  for (int byte = 0; byte < 255; ++byte)
    EXPECT_EQ(static_cast<double>(E8M0ToF32(static_cast<uint8_t>(byte))),
              std::ldexp(1.0, byte - 127));
  EXPECT_TRUE(std::isnan(E8M0ToF32(255)));
}

// Nearest of all codes in double, the even one of two equally near.
template <class Decode>
uint32_t NearestCode(double x, uint32_t num_codes, Decode decode) {
  uint32_t best = 0;
  for (uint32_t code = 1; code < num_codes; ++code) {
    const double error = std::abs(decode(code) - x);
    const double best_error = std::abs(decode(best) - x);
    if (error < best_error || (error == best_error && code % 2 == 0)) best = code;
  }
  return best;
}

TEST(NarrowFormats, RandomNumbersGoToTheNearestCode) {
  constexpr uint64_t kSeed = 20261201;
  std::mt19937_64 random(kSeed);
  for (int i = 0; i < 20000; ++i) {
    const int exponent = 127 - 12 + static_cast<int>(random() % 24);
    const uint32_t bits = static_cast<uint32_t>(exponent) << 23 | (random() & 0x7fffff);
    const float x = std::bit_cast<float>(bits);
    ASSERT_EQ(F32ToE4M3Saturating(x),
              NearestCode(static_cast<double>(x), 0x7f, [](uint32_t c) { return Value(c, 4, 3); }))
        << x << " seed " << kSeed;
    ASSERT_EQ(F32ToE2M1Saturating(x),
              NearestCode(static_cast<double>(x), 8,
                          [](uint32_t c) {
                            return static_cast<double>(E2M1ToF32(static_cast<uint8_t>(c)));
                          }))
        << x << " seed " << kSeed;
  }
}

TEST(DType, BytesAndNames) {
  EXPECT_EQ(DTypeBytes(DType::kF32), 4u);
  EXPECT_EQ(DTypeBytes(DType::kBf16), 2u);
  EXPECT_EQ(DTypeBytes(DType::kF8E4M3), 1u);
  EXPECT_EQ(DTypeBytes(DType::kI64), 8u);
  EXPECT_STREQ(DTypeName(DType::kF8E8M0), "f8_e8m0");
}

}  // namespace
}  // namespace twinspark
