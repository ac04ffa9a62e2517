// Rope tables against the check values of the model specification (3.0), rotation against double,
// inverse, partial rotation, odd sizes, every SIMD target.
#include "kernels/rope/rope.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/testing/op_fixture.h"

namespace twinspark {
namespace {

TEST(RopeFrequencies, MatchTheSpecificationsCheckValues) {
  const std::vector<float> plain = PlainRopeFrequencies(64, 10000.0f);
  ASSERT_EQ(plain.size(), 32u);
  EXPECT_NEAR(plain[1], 0.74989421, 1e-7);
  EXPECT_NEAR(plain[31], 1.3335214e-4, 1e-10);
  const std::vector<float> yarn = YarnRopeFrequencies(
      {.rope_dim = 64, .theta = 160000.0f, .factor = 16.0f, .original_max_position = 65536.0f});
  const struct {
    size_t i;
    double f;
  } want[] = {{0, 1.0},           {1, 0.68765602},    {15, 3.6355386e-3}, {16, 2.2656250e-3},
              {20, 2.9697778e-4}, {24, 1.9531250e-5}, {25, 5.3723127e-6}, {31, 5.6805290e-7}};
  for (const auto& w : want)
    EXPECT_NEAR(yarn[w.i], w.f, 2e-7 * w.f) << w.i;
  const std::vector<float> unscaled = YarnRopeFrequencies(
      {.rope_dim = 64, .theta = 160000.0f, .factor = 1.0f, .original_max_position = 65536.0f});
  EXPECT_EQ(unscaled, PlainRopeFrequencies(64, 160000.0f));
}

TEST(RopeTable, UsesTheSinglePrecisionProduct) {
  OpContext context(3);
  const std::vector<float> f = PlainRopeFrequencies(8, 10000.0f);
  std::vector<int64_t> positions;
  for (int64_t p = 0; p < 40; ++p)
    positions.push_back(p * 26214);
  Matrix table(40, 8, DType::kF32);
  RopeTableCpu({.positions = positions.data(), .frequencies = f.data(), .out = table.view()},
               context.launch());
  for (int64_t t = 0; t < 40; ++t) {
    for (int64_t i = 0; i < 4; ++i) {
      const float angle =
          static_cast<float>(positions[static_cast<size_t>(t)]) * f[static_cast<size_t>(i)];
      EXPECT_NEAR(table.at(t, i), std::cos(static_cast<double>(angle)), 1e-7);
      EXPECT_NEAR(table.at(t, 4 + i), std::sin(static_cast<double>(angle)), 1e-7);
    }
  }
}

struct RopeCase {
  int64_t rows, heads;
  int head_dim, rope_dim;
};

TEST(Rope, RotatesInterleavedPairsOfTheLastChannels) {
  OpContext context(2);
  OnEverySimdTarget([&] {
    RandomTensor random(21);
    for (const RopeCase& c :
         {RopeCase{3, 2, 12, 10}, RopeCase{9, 1, 64, 64}, RopeCase{5, 3, 128, 32},
          RopeCase{1, 4, 512, 64}, RopeCase{2, 1, 7, 2}}) {
      for (const DType type : {DType::kF32, DType::kBf16}) {
        Matrix x(c.rows, c.heads * c.head_dim, type), out(c.rows, c.heads * c.head_dim, type);
        Matrix table(c.rows, c.rope_dim, DType::kF32);
        x.Fill(random);
        table.Fill(random);
        RopeParams params{.x = x.view(),
                          .head_dim = c.head_dim,
                          .rope_dim = c.rope_dim,
                          .table = table.view(),
                          .out = out.view()};
        for (const bool inverse : {false, true}) {
          params.inverse = inverse;
          RopeCpu(params, context.launch());
          std::vector<double> want;
          for (int64_t t = 0; t < c.rows; ++t) {
            for (int64_t j = 0; j < x.cols(); ++j) {
              const int64_t channel = j % c.head_dim - (c.head_dim - c.rope_dim);
              if (channel < 0) {
                want.push_back(x.at(t, j));
                continue;
              }
              const double cosine = table.at(t, channel / 2);
              const double sine =
                  (inverse ? -1.0 : 1.0) * table.at(t, c.rope_dim / 2 + channel / 2);
              const double u = x.at(t, j - channel % 2), v = x.at(t, j - channel % 2 + 1);
              want.push_back(channel % 2 == 0 ? u * cosine - v * sine : u * sine + v * cosine);
            }
          }
          EXPECT_TRUE(Near(out, want, 1e-6, 1e-6)) << c.head_dim;
          EXPECT_TRUE(out.PaddingIntact());
        }
        RopeParams in_place = params;
        in_place.out = x.view();
        RopeCpu(in_place, context.launch());
        EXPECT_TRUE(SameBits(x, out));
      }
    }
  });
}

TEST(Rope, RowsDoNotDependOnCompanyOrThreads) {
  RandomTensor random(22);
  constexpr int64_t kRows = 503;
  Matrix x(kRows, 96, DType::kBf16), table(kRows, 24, DType::kF32);
  Matrix alone(kRows, 96, DType::kBf16);
  x.Fill(random);
  table.Fill(random);
  OpContext one(1);
  for (int64_t r = 0; r < kRows; ++r) {
    RopeCpu({.x = x.view().Rows(r, 1),
             .head_dim = 48,
             .rope_dim = 24,
             .table = table.view().Rows(r, 1),
             .out = alone.view().Rows(r, 1)},
            one.launch());
  }
  for (const int threads : {1, 2, 3}) {
    OpContext context(threads);
    Matrix out(kRows, 96, DType::kBf16);
    RopeCpu(
        {.x = x.view(), .head_dim = 48, .rope_dim = 24, .table = table.view(), .out = out.view()},
        context.launch());
    EXPECT_TRUE(SameBits(out, alone));
  }
}

}  // namespace
}  // namespace twinspark
