// The cache quantisers against a naive version of the specification's formulas (model specification
// 3.0), bit for bit on every SIMD target: every tie and its neighbours for every scale code, scale
// boundaries, zeros of both signs, tiny and huge maxima, random rows. Packed rows must decode to
// the simulated values.
#include "kernels/quant/quantize_rows.h"

#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/testing/op_fixture.h"

namespace twinspark {
namespace {

// Nearest of a table of magnitudes, ties to the even code; in double, so every step is exact.
template <class Decode>
float NaiveRound(float y, int num_codes, const Decode& decode) {
  const double magnitude = std::abs(static_cast<double>(y));
  int best = 0;
  for (int code = 1; code < num_codes; ++code) {
    const double d = std::abs(magnitude - static_cast<double>(decode(code)));
    const double best_d = std::abs(magnitude - static_cast<double>(decode(best)));
    if (d < best_d || (d == best_d && code % 2 == 0)) best = code;
  }
  return std::copysign(decode(best), y);
}
float NaiveE4M3(int code) {
  const int exponent = code >> 3, mantissa = code & 7;
  return exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                       : std::ldexp(1.0f + static_cast<float>(mantissa) / 8, exponent - 7);
}
float NaiveE2M1(int code) {
  constexpr float kValues[8] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  return kValues[code];
}

float NaivePowerOfTwoCeil(float t) {
  const uint32_t bits = std::bit_cast<uint32_t>(t);
  return std::bit_cast<float>((bits & 0x7f800000u) + ((bits & 0x7fffffu) != 0 ? 0x800000u : 0u));
}

std::vector<float> NaiveQuantize(CacheFormat format, const std::vector<float>& x) {
  if (format == CacheFormat::kF32) return x;
  const size_t group = static_cast<size_t>(CacheGroup(format));
  std::vector<float> out;
  for (size_t g = 0; g < x.size(); g += group) {
    float largest = 0;
    for (size_t i = g; i < g + group; ++i)
      largest = std::max(largest, std::abs(x[i]));
    float scale = 0;
    if (format == CacheFormat::kQ8) {
      scale = NaivePowerOfTwoCeil(std::max(largest, 1e-4f) * (1.0f / 448.0f));
    } else if (format == CacheFormat::kQ4E8) {
      scale = NaivePowerOfTwoCeil(std::max(largest, 6.0f * 0x1p-126f) * (1.0f / 6.0f));
    } else {
      const float ratio = std::max(largest, 6.0f * 0x1p-9f) / 6.0f;
      scale = NaiveRound(std::min(ratio, 448.0f), 127, NaiveE4M3);
    }
    for (size_t i = g; i < g + group; ++i) {
      const float limit = format == CacheFormat::kQ8 ? 448.0f : 6.0f;
      const float y = std::min(std::max(x[i] / scale, -limit), limit);
      const float rounded =
          format == CacheFormat::kQ8 ? NaiveRound(y, 127, NaiveE4M3) : NaiveRound(y, 8, NaiveE2M1);
      out.push_back(rounded * scale);
    }
  }
  return out;
}

constexpr CacheFormat kFormats[] = {CacheFormat::kF32, CacheFormat::kQ8, CacheFormat::kQ4E8,
                                    CacheFormat::kQ4E4};

// Rows of whole groups through values, store and load, each against the naive version.
void CheckRow(const std::vector<float>& x, CacheFormat format, OpContext& context) {
  const int64_t n = static_cast<int64_t>(x.size());
  const std::vector<float> want = NaiveQuantize(format, x);
  Matrix in(1, n, DType::kF32), values(1, n, DType::kF32), loaded(1, n, DType::kF32);
  Matrix rounded(1, n, DType::kBf16);
  for (int64_t i = 0; i < n; ++i)
    in.set(0, i, x[static_cast<size_t>(i)]);
  QuantizeValuesCpu({.x = in.view(), .format = format, .out = values.view()}, context.launch());
  std::vector<uint8_t> packed(static_cast<size_t>(CacheRowBytes(format, n)) + 1, 0xee);
  const CacheRows rows{packed.data(), format, 1, n};
  StoreRowsCpu({.x = in.view(), .dst = rows}, context.launch());
  LoadRowsCpu({.src = rows, .out = loaded.view()}, context.launch());
  LoadRowsCpu({.src = rows, .out = rounded.view()}, context.launch());
  EXPECT_EQ(packed.back(), 0xee) << "written past the row";
  for (int64_t i = 0; i < n; ++i) {
    const size_t at = static_cast<size_t>(i);
    const uint32_t bits = std::bit_cast<uint32_t>(want[at]);
    ASSERT_EQ(std::bit_cast<uint32_t>(values.at(0, i)), bits)
        << CacheFormatName(format) << " of " << x[at] << ": " << values.at(0, i) << ", want "
        << want[at];
    ASSERT_EQ(std::bit_cast<uint32_t>(loaded.at(0, i)), bits) << CacheFormatName(format);
    if (format != CacheFormat::kF32) {
      ASSERT_EQ(rounded.at(0, i), want[at]) << "not exact in bf16";
    }
  }
}

TEST(CacheFormat, RowSizes) {
  EXPECT_EQ(CacheRowBytes(CacheFormat::kQ8, 512), 528);
  EXPECT_EQ(CacheRowBytes(CacheFormat::kQ4E4, 512), 288);
  EXPECT_EQ(CacheRowBytes(CacheFormat::kQ4E8, 128), 68);
  EXPECT_EQ(CacheRowBytes(CacheFormat::kF32, 512), 2048);
}

TEST(Quantizers, RandomRowsOfAllMagnitudes) {
  OpContext context(1);
  OnEverySimdTarget([&] {
    RandomTensor random(31);
    for (const CacheFormat format : kFormats) {
      for (int row = 0; row < 150; ++row) {
        std::vector<float> x;
        const float scale = std::ldexp(1.0f, static_cast<int>(random.Below(240)) - 120);
        for (int i = 0; i < 96; ++i)
          x.push_back(random.Normal() * (row % 3 == 0 ? 1.0f : scale));
        CheckRow(x, format, context);
      }
    }
  });
}

// For every scale a group can have near 1, every midpoint between codes and its two neighbours.
TEST(Quantizers, TiesAndTheirNeighbours) {
  OpContext context(1);
  OnEverySimdTarget([&] {
    for (const CacheFormat format : {CacheFormat::kQ8, CacheFormat::kQ4E8, CacheFormat::kQ4E4}) {
      const bool e4m3 = format == CacheFormat::kQ8;
      const int num_codes = e4m3 ? 127 : 8;
      const int num_scales = format == CacheFormat::kQ4E4 ? 126 : 5;
      for (int s = 0; s < num_scales; ++s) {
        const float scale =
            format == CacheFormat::kQ4E4 ? NaiveE4M3(s + 1) : std::ldexp(1.0f, s - 2);
        const float largest = (e4m3 ? 448.0f : 6.0f) * scale;
        const size_t group = static_cast<size_t>(CacheGroup(format));
        std::vector<float> x;
        const auto push = [&](float value) {
          if (x.size() % group == 0) x.push_back(largest);  // fixes the scale of the group
          x.push_back(x.size() % 2 == 0 ? value : -value);
        };
        for (int code = 0; code + 1 < num_codes; ++code) {
          const float low = e4m3 ? NaiveE4M3(code) : NaiveE2M1(code);
          const float high = e4m3 ? NaiveE4M3(code + 1) : NaiveE2M1(code + 1);
          const float middle = (low + high) / 2 * scale;
          push(middle);
          push(std::nextafter(middle, 0.0f));
          push(std::nextafter(middle, 1e30f));
        }
        while (x.size() % group != 0)
          x.push_back(-0.0f);
        CheckRow(x, format, context);
      }
    }
  });
}

// Group maxima on both sides of every boundary at which the scale changes.
TEST(Quantizers, ScaleBoundaries) {
  OpContext context(1);
  OnEverySimdTarget([&] {
    for (const CacheFormat format : {CacheFormat::kQ8, CacheFormat::kQ4E8, CacheFormat::kQ4E4}) {
      const float limit = format == CacheFormat::kQ8 ? 448.0f : 6.0f;
      std::vector<float> maxima = {0.0f,
                                   1e-4f,
                                   1e-30f,
                                   3.3e38f,
                                   std::numeric_limits<float>::min(),
                                   std::numeric_limits<float>::denorm_min()};
      for (int e = -126; e < 118; ++e)
        maxima.push_back(limit * std::ldexp(1.0f, e));
      for (int code = 0; code + 1 < 127; ++code) {
        maxima.push_back(limit * (NaiveE4M3(code) + NaiveE4M3(code + 1)) / 2);
      }
      for (const float m : maxima) {
        for (const float largest : {m, std::nextafter(m, 0.0f), std::nextafter(m, 3.3e38f)}) {
          std::vector<float> x(static_cast<size_t>(CacheGroup(format)), 0.0f);
          x[0] = -largest;
          x[1] = largest / 3;
          x[2] = -0.0f;
          x[3] = largest / 447;
          CheckRow(x, format, context);
        }
      }
    }
  });
}

TEST(Quantizers, ZeroRowsStayZero) {
  OpContext context(1);
  for (const CacheFormat format : kFormats)
    CheckRow(std::vector<float>(64, 0.0f), format, context);
}

TEST(StoreRows, FollowsTheIndexAndSkips) {
  RandomTensor random(32);
  for (const int threads : {1, 2, 3}) {
    OpContext context(threads);
    for (const CacheFormat format : kFormats) {
      Matrix x(90, 64, DType::kBf16), back(90, 64, DType::kF32);
      x.Fill(random);
      std::vector<uint8_t> bytes(static_cast<size_t>(CacheRowBytes(format, 64) * 190), 0);
      const CacheRows rows{bytes.data(), format, 190, 64};
      std::vector<int64_t> index;
      for (int64_t t = 0; t < 90; ++t)
        index.push_back(t == 7 ? -1 : 2 * t + 3);
      StoreRowsCpu({.x = x.view(), .dst = rows, .index = index.data()}, context.launch());
      std::vector<int64_t> read = index;
      read[7] = 0;
      LoadRowsCpu({.src = rows, .index = read.data(), .out = back.view()}, context.launch());
      Matrix want(90, 64, DType::kF32);
      QuantizeValuesCpu({.x = x.view(), .format = format, .out = want.view()}, context.launch());
      for (int64_t c = 0; c < 64; ++c)
        want.set(7, c, 0);
      EXPECT_TRUE(SameBits(back, want)) << CacheFormatName(format);

      std::vector<uint8_t> copy(bytes.size(), 0);
      const CacheRows copied{copy.data(), format, 190, 64};
      CopyRowsCpu({.src = rows,
                   .dst = copied,
                   .num_rows = 90,
                   .src_index = read.data(),
                   .dst_index = index.data()},
                  context.launch());
      EXPECT_EQ(copy, bytes);
    }
  }
}

}  // namespace
}  // namespace twinspark
