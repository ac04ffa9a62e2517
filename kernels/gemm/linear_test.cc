// Goal: the linear op is right for every stored format and invariant, on every SIMD target. Method:
// a naive product in double over independently decoded weights; bit comparison of rows alone and
// together, of threads, of slices, of batches that mix storages.
#include "kernels/gemm/linear.h"

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/simd_target.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/random_exl3.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {
namespace {

// A matrix [out, in] in one stored format, with its values as double.
struct Stored {
  DenseFormat format;
  int64_t out, in;
  std::vector<Bf16> bf16;
  std::vector<float> f32;
  std::vector<F16> f16;
  std::vector<uint8_t> codes, scales;
  std::vector<double> values;

  Stored(uint64_t seed, DenseFormat format_in, int64_t out_in, int64_t in_in)
      : format(format_in), out(out_in), in(in_in) {
    RandomTensor random(seed);
    const int64_t groups = (in + 31) / 32;
    codes.resize(static_cast<size_t>(out * in));  // twice what FP4 needs
    for (uint8_t& code : codes) {
      do {
        code = static_cast<uint8_t>(random.Bits());
      } while (format == DenseFormat::kFp8Block32 && (code & 0x7f) == 0x7f);
    }
    scales.resize(static_cast<size_t>(out * groups));
    for (uint8_t& scale : scales)
      scale = static_cast<uint8_t>(117 + random.Below(8));
    for (int64_t o = 0; o < out; ++o) {
      for (int64_t i = 0; i < in; ++i) {
        const float value = random.Normal() * 0.1f;
        f32.push_back(value);
        bf16.push_back(ToBf16(value));
        f16.push_back(ToF16(value));
        values.push_back(Value(o, i, groups));
      }
    }
  }

  double Value(int64_t o, int64_t i, int64_t groups) const {
    const size_t at = static_cast<size_t>(o * in + i);
    switch (format) {
      case DenseFormat::kBf16:
        return static_cast<double>(ToF32(bf16[at]));
      case DenseFormat::kF32:
        return static_cast<double>(f32[at]);
      case DenseFormat::kF16:
        return static_cast<double>(ToF32(f16[at]));
      case DenseFormat::kFp8Block32:
        return static_cast<double>(E4M3ToF32(codes[at])) *
               std::ldexp(1.0, scales[static_cast<size_t>(o / 32 * groups + i / 32)] - 127);
      case DenseFormat::kFp4Group32: {
        const uint8_t two = codes[at / 2];
        return static_cast<double>(E2M1ToF32(i % 2 == 0 ? two & 15 : two >> 4)) *
               std::ldexp(1.0, scales[static_cast<size_t>(o * groups + i / 32)] - 127);
      }
    }
    return 0.0;
  }

  DenseSource Source() const {
    DenseSource s;
    s.format = format;
    s.out = out;
    s.in = in;
    s.scales = scales.data();
    switch (format) {
      case DenseFormat::kBf16:
        s.data = bf16.data();
        break;
      case DenseFormat::kF32:
        s.data = f32.data();
        break;
      case DenseFormat::kF16:
        s.data = f16.data();
        break;
      default:
        s.data = codes.data();
    }
    return s;
  }
};

LinearWeights Prepare(const DenseSource& source) {
  absl::StatusOr<DenseWeights> w = DenseWeights::Prepare(source);
  CHECK(w.ok()) << w.status().ToString();
  return LinearWeights(*std::move(w));
}

struct Runner {
  explicit Runner(int threads) : pool(threads), arena(64 << 20) {
    launch.pool = &pool;
    launch.arena = &arena;
  }
  ThreadPool pool;
  Arena arena;
  Launch launch;

  std::vector<float> Run(const LinearWeights& w, ConstTensorView x) {
    std::vector<float> y(static_cast<size_t>(x.rows * w.out_features()));
    LinearCpu({&w, x, MakeView(y.data(), x.rows, w.out_features()), Exl3Rounding::kNone}, launch);
    return y;
  }
};

constexpr std::array<DenseFormat, 5> kFormats = {DenseFormat::kBf16, DenseFormat::kF32,
                                                 DenseFormat::kF16, DenseFormat::kFp8Block32,
                                                 DenseFormat::kFp4Group32};

class LinearOnTarget : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(PinSimdTarget(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(PinSimdTarget("auto").ok()); }
};
INSTANTIATE_TEST_SUITE_P(Targets,
                         LinearOnTarget,
                         ::testing::ValuesIn(SimdTargets()),
                         [](const auto& target) { return target.param; });

TEST_P(LinearOnTarget, IsNearDoubleForEveryFormatAndOddShapes) {
  Runner runner(2);
  for (DenseFormat format : kFormats) {
    for (const auto& [out, in] :
         {std::pair<int64_t, int64_t>{1, 32}, {16, 64}, {33, 96}, {70, 160}}) {
      for (int64_t rows : {1, 5, 14}) {
        const Stored m(static_cast<uint64_t>(out), format, out, in);
        const LinearWeights w = Prepare(m.Source());
        const std::vector<Bf16> x = RandomTensor(3).NormalBf16(rows * in);
        const std::vector<float> y = runner.Run(w, MakeView(x.data(), rows, in));
        std::vector<double> want(y.size());
        double largest = 0.0;
        for (int64_t r = 0; r < rows; ++r) {
          for (int64_t o = 0; o < out; ++o) {
            double sum = 0.0;
            for (int64_t i = 0; i < in; ++i)
              sum += static_cast<double>(ToF32(x[static_cast<size_t>(r * in + i)])) *
                     m.values[static_cast<size_t>(o * in + i)];
            want[static_cast<size_t>(r * out + o)] = sum;
            largest = std::max(largest, std::abs(sum));
          }
        }
        EXPECT_TRUE(AllNear<double>(y, want, 2e-6 * largest, 2e-6))
            << "format " << static_cast<int>(format) << " " << out << "x" << in << " rows " << rows;
      }
    }
  }
}

TEST_P(LinearOnTarget, RowsHaveTheSameBitsAloneTogetherAndThreaded) {
  for (DenseFormat format : {DenseFormat::kBf16, DenseFormat::kF32}) {
    const Stored m(5, format, 100, 300);
    const LinearWeights w = Prepare(m.Source());
    constexpr int64_t kRows = 200;
    const std::vector<Bf16> x = RandomTensor(6).NormalBf16(kRows * m.in);
    Runner one(1);
    const std::vector<float> all = one.Run(w, MakeView(x.data(), kRows, m.in));
    for (int threads : {2, 3}) {
      Runner several(threads);
      EXPECT_TRUE(BitEqual<float>(several.Run(w, MakeView(x.data(), kRows, m.in)), all));
    }
    for (int64_t rows : {1, 2, 6, 7, 12, 13, 64}) {
      const int64_t first = kRows - rows;
      EXPECT_TRUE(BitEqual<float>(one.Run(w, MakeView(x.data() + first * m.in, rows, m.in)),
                                  std::span(all).subspan(static_cast<size_t>(first * m.out))))
          << rows;
    }
    std::vector<float> widened;  // the same numbers as f32
    for (Bf16 v : x)
      widened.push_back(ToF32(v));
    EXPECT_TRUE(BitEqual<float>(one.Run(w, MakeView(widened.data(), kRows, m.in)), all));
  }
}

TEST_P(LinearOnTarget, SlicesOfEveryFormatGiveTheBitsOfTheWhole) {
  Runner runner(1);
  for (DenseFormat format : kFormats) {
    const Stored m(8, format, 96, 128);
    const std::vector<Bf16> x = RandomTensor(9).NormalBf16(2 * m.in);
    const std::vector<float> y = runner.Run(Prepare(m.Source()), MakeView(x.data(), 2, m.in));
    // Outputs [32, 96).
    const bool fp4 = format == DenseFormat::kFp4Group32;
    const bool fp8 = format == DenseFormat::kFp8Block32;
    DenseSource s = m.Source();
    const int64_t element_bytes = format == DenseFormat::kF32 ? 4 : fp4 || fp8 ? 1 : 2;
    const int64_t row_elements = fp4 ? m.in / 2 : m.in;
    s.out = 64;
    s.data = static_cast<const char*>(s.data) + 32 * row_elements * element_bytes;
    s.scales += (fp4 ? 32 : 1) * (m.in / 32);
    const std::vector<float> part = runner.Run(Prepare(s), MakeView(x.data(), 2, m.in));
    for (int64_t r = 0; r < 2; ++r)
      EXPECT_TRUE(BitEqual<float>(std::span(part).subspan(static_cast<size_t>(r * 64), 64),
                                  std::span(y).subspan(static_cast<size_t>(r * 96 + 32), 64)))
          << static_cast<int>(format);
    // Inputs [64, 128): the same as a matrix of its own.
    s = m.Source();
    s.in = 64;
    s.row_stride = row_elements;
    s.scale_stride = m.in / 32;
    s.data = static_cast<const char*>(s.data) + 64 * element_bytes / (fp4 ? 2 : 1);
    s.scales += 2;
    const std::vector<float> half =
        runner.Run(Prepare(s), ConstTensorView(MakeView(x.data(), 2, m.in)).Cols(64, 64));
    std::vector<double> want(half.size());
    for (size_t at = 0; at < half.size(); ++at) {
      const int64_t r = static_cast<int64_t>(at) / m.out;
      const int64_t o = static_cast<int64_t>(at) % m.out;
      for (int64_t i = 64; i < 128; ++i)
        want[at] += static_cast<double>(ToF32(x[static_cast<size_t>(r * m.in + i)])) *
                    m.values[static_cast<size_t>(o * m.in + i)];
    }
    EXPECT_LT(RelativeL2<double>(half, want), 1e-6) << static_cast<int>(format);
  }
}

TEST_P(LinearOnTarget, ABatchOfDifferentStoragesAndRowsEqualsItsParts) {
  constexpr int64_t kIn = 128;
  const Stored dense(12, DenseFormat::kBf16, 40, kIn);
  const LinearWeights w0 = Prepare(dense.Source());
  RandomTensor random(13);
  const LinearWeights w1(RandomExl3(128, 128, 4, Exl3Weights::Form::kTrellis));
  const std::vector<Bf16> x = random.NormalBf16(7 * kIn);
  Runner runner(2);
  const std::vector<float> y0 = runner.Run(w0, MakeView(x.data(), 7, kIn));
  const std::vector<float> y1 = runner.Run(w1, MakeView(x.data(), 3, kIn));
  std::vector<float> b0(y0.size()), b1(y1.size());
  std::vector<Bf16> rounded(y0.size());
  const std::array<LinearParams, 3> jobs = {
      LinearParams{&w0, MakeView(x.data(), 7, kIn), MakeView(b0.data(), 7, 40),
                   Exl3Rounding::kNone},
      LinearParams{&w1, MakeView(x.data(), 3, kIn), MakeView(b1.data(), 3, 128),
                   Exl3Rounding::kNone},
      LinearParams{&w0, MakeView(x.data(), 7, kIn), MakeView(rounded.data(), 7, 40),
                   Exl3Rounding::kNone}};
  LinearBatchCpu({jobs}, runner.launch);
  EXPECT_TRUE(BitEqual<float>(b0, y0));
  EXPECT_TRUE(BitEqual<float>(b1, y1));
  for (size_t i = 0; i < y0.size(); ++i)
    ASSERT_EQ(rounded[i].bits, ToBf16(y0[i]).bits);
}

TEST_P(LinearOnTarget, StoresRoundToNearestEvenAndKeepNan) {
  // The identity: y = x, so the store alone is seen.
  std::vector<float> eye(32 * 32, 0.0f);
  for (size_t i = 0; i < 32; ++i)
    eye[i * 33] = 1.0f;
  DenseSource s;
  s.format = DenseFormat::kF32;
  s.out = s.in = 32;
  s.data = eye.data();
  const LinearWeights w = Prepare(s);
  RandomTensor random(15);
  Runner runner(1);
  for (int round = 0; round < 50; ++round) {
    std::vector<float> x(32, 0.0f);
    const uint32_t tie = static_cast<uint32_t>(random.Bits()) & 0x3fff0000u;
    const size_t at = static_cast<size_t>(round % 32);
    x[at] = std::bit_cast<float>(tie | (round % 3 == 0   ? 0x8000u
                                        : round % 3 == 1 ? 0x7fffu
                                                         : 0x8001u));
    std::vector<Bf16> y(32);
    LinearCpu({&w, MakeView(x.data(), 1, 32), MakeView(y.data(), 1, 32), Exl3Rounding::kNone},
              runner.launch);
    EXPECT_EQ(y[at].bits, ToBf16(x[at]).bits);
  }
  std::vector<float> x(32, std::nanf(""));
  std::vector<Bf16> y(32);
  LinearCpu({&w, MakeView(x.data(), 1, 32), MakeView(y.data(), 1, 32), Exl3Rounding::kNone},
            runner.launch);
  EXPECT_TRUE(std::isnan(ToF32(y[0])));
}

TEST(DenseWeights, RefusesWhatIsNotExactOrHasNoScales) {
  Stored m(20, DenseFormat::kFp8Block32, 32, 32);
  EXPECT_TRUE(DenseWeights::Prepare(m.Source()).ok());
  m.scales[0] = 255;
  EXPECT_FALSE(DenseWeights::Prepare(m.Source()).ok()) << "NaN scale";
  DenseSource s = m.Source();
  s.scales = nullptr;
  EXPECT_FALSE(DenseWeights::Prepare(s).ok());
  Stored bf16(21, DenseFormat::kBf16, 4, 4);
  bf16.bf16[3] = Bf16{0x7fc0};
  EXPECT_FALSE(DenseWeights::Prepare(bf16.Source()).ok()) << "NaN weight";
}

TEST(Linear, TakesNoMoreScratchThanItSays) {
  const Stored m(30, DenseFormat::kBf16, 40, 100);
  const LinearWeights w = Prepare(m.Source());
  for (int64_t rows : {1, 13, 500}) {
    Arena arena(LinearScratchBytes(w, rows, 2));
    ThreadPool pool(2);
    Launch launch;
    launch.pool = &pool;
    launch.arena = &arena;
    const std::vector<Bf16> x(static_cast<size_t>(rows * m.in), ToBf16(1.0f));
    std::vector<float> y(static_cast<size_t>(rows * m.out));
    LinearCpu(
        {&w, MakeView(x.data(), rows, m.in), MakeView(y.data(), rows, m.out), Exl3Rounding::kNone},
        launch);
    EXPECT_EQ(arena.used_bytes(), 0u);
  }
}

}  // namespace
}  // namespace twinspark
