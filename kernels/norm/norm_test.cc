// RMSNorm, addition and embedding against double, on every SIMD target, at sizes off the vector
// width; rows must not depend on the rows beside them or on the threads.
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/norm/add.h"
#include "kernels/norm/embed.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/testing/op_fixture.h"

namespace twinspark {
namespace {

std::vector<double> NaiveRmsNorm(const Matrix& x, const Matrix& weight, double eps) {
  std::vector<double> out;
  for (int64_t r = 0; r < x.rows(); ++r) {
    double sum = 0;
    for (int64_t c = 0; c < x.cols(); ++c)
      sum += static_cast<double>(x.at(r, c)) * x.at(r, c);
    const double inverse = 1.0 / std::sqrt(sum / static_cast<double>(x.cols()) + eps);
    for (int64_t c = 0; c < x.cols(); ++c)
      out.push_back(weight.at(0, c) * x.at(r, c) * inverse);
  }
  return out;
}

TEST(RmsNorm, NearDoubleOnEveryTarget) {
  OpContext context(1);
  OnEverySimdTarget([&] {
    RandomTensor random(11);
    for (const int64_t n : {1, 3, 7, 16, 31, 64, 65, 257, 512}) {
      for (const DType in : {DType::kF32, DType::kBf16}) {
        for (const DType type : {DType::kF32, DType::kBf16}) {
          Matrix x(3, n, in), weight(1, n, DType::kF32), out(3, n, type);
          x.Fill(random);
          weight.Fill(random);
          for (int64_t c = 0; c < n; ++c)
            x.set(1, c, 0);  // zero row
          for (int64_t c = 0; c < n; ++c)
            x.set(2, c, 3e-9f * x.at(0, c));  // tiny row
          RmsNormCpu({.x = x.view(), .weight = weight.view(), .eps = 1e-20f, .out = out.view()},
                     context.launch());
          EXPECT_TRUE(Near(out, NaiveRmsNorm(x, weight, 1e-20), 0, 2e-6)) << n;
          EXPECT_TRUE(out.PaddingIntact());
        }
      }
    }
  });
}

TEST(RmsNorm, RowsDoNotDependOnCompanyOrThreads) {
  RandomTensor random(12);
  constexpr int64_t kRows = 331, kCols = 200;
  Matrix x(kRows, kCols, DType::kBf16), weight(1, kCols, DType::kF32);
  x.Fill(random);
  weight.Fill(random);
  Matrix alone(kRows, kCols, DType::kF32);
  OpContext one(1);
  for (int64_t r = 0; r < kRows; ++r) {
    RmsNormCpu({.x = x.view().Rows(r, 1),
                .weight = weight.view(),
                .eps = 0,
                .out = alone.view().Rows(r, 1)},
               one.launch());
  }
  for (const int threads : {1, 2, 3}) {
    OpContext context(threads);
    Matrix out(kRows, kCols, DType::kF32);
    RmsNormCpu({.x = x.view(), .weight = weight.view(), .eps = 0, .out = out.view()},
               context.launch());
    EXPECT_TRUE(SameBits(out, alone)) << threads;
  }
}

TEST(RmsNorm, WorksInPlace) {
  RandomTensor random(13);
  OpContext context(1);
  Matrix x(2, 77, DType::kF32), weight(1, 77, DType::kF32), out(2, 77, DType::kF32);
  x.Fill(random);
  weight.Fill(random);
  RmsNormCpu({.x = x.view(), .weight = weight.view(), .eps = 1e-6f, .out = out.view()},
             context.launch());
  RmsNormCpu({.x = x.view(), .weight = weight.view(), .eps = 1e-6f, .out = x.view()},
             context.launch());
  EXPECT_TRUE(SameBits(x, out));
}

TEST(Add, RoundsOnceAtTheStore) {
  RandomTensor random(14);
  OpContext context(2);
  OnEverySimdTarget([&] {
    for (const int64_t n : {1, 5, 16, 33, 130}) {
      Matrix a(19, n, DType::kF32), b(19, n, DType::kF32), out(19, n, DType::kBf16);
      a.Fill(random);
      b.Fill(random);
      AddCpu({.a = a.view(), .b = b.view(), .out = out.view()}, context.launch());
      for (int64_t r = 0; r < 19; ++r) {
        for (int64_t c = 0; c < n; ++c) {
          EXPECT_EQ(out.at(r, c), RoundBf16(a.at(r, c) + b.at(r, c)));
        }
      }
      AddCpu({.a = a.view(), .out = out.view()}, context.launch());
      EXPECT_EQ(out.at(18, n - 1), RoundBf16(a.at(18, n - 1)));
      EXPECT_TRUE(out.PaddingIntact());
    }
  });
}

TEST(Add, RoundsTiesAndSpecialValuesLikeTheScalarConversion) {
  OpContext context(1);
  OnEverySimdTarget([&] {
    std::vector<float> values;
    for (uint32_t upper = 0; upper < 0x10000; upper += 0x11) {
      for (const uint32_t lower : {0x0u, 0x1u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
        values.push_back(std::bit_cast<float>((upper << 16) | lower));
      }
    }
    const int64_t n = static_cast<int64_t>(values.size());
    Matrix out(1, n, DType::kBf16);
    AddCpu({.a = MakeView(static_cast<const float*>(values.data()), 1, n), .out = out.view()},
           context.launch());
    for (int64_t i = 0; i < n; ++i) {
      const uint16_t want = ToBf16(values[static_cast<size_t>(i)]).bits;
      ASSERT_EQ(out.view().Row<Bf16>(0)[i].bits, want) << values[static_cast<size_t>(i)];
    }
  });
}

TEST(Embed, CopiesToEveryStreamAndLeavesForeignIdsZero) {
  RandomTensor random(15);
  OpContext context(2);
  for (const DType type : {DType::kF32, DType::kBf16}) {
    Matrix table(5, 13, DType::kBf16), out(4, 26, type);
    table.Fill(random);
    const int32_t ids[4] = {10, 14, 9, 15};
    EmbedCpu(
        {.table = table.view(), .ids = ids, .first_id = 10, .num_copies = 2, .out = out.view()},
        context.launch());
    for (int64_t c = 0; c < 26; ++c) {
      EXPECT_EQ(out.at(0, c), table.at(0, c % 13));
      EXPECT_EQ(out.at(1, c), table.at(4, c % 13));
      EXPECT_EQ(out.at(2, c), 0);
      EXPECT_EQ(out.at(3, c), 0);
    }
  }
}

}  // namespace
}  // namespace twinspark
