// Goal: the EXL3 decode is exact and the linear is right and invariant, on every SIMD target.
// Method: whole-table digests of the three codebooks; every state through the SIMD decode; a naive
// decoder and a naive product in double written from the format's text; bit comparison of rows
// computed alone and together, with 1..3 threads, in slices, in a batch and from the f16 copy.
#include "kernels/exl3/exl3_linear.h"

#include <array>
#include <cmath>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/exl3/exl3_decode_tile.h"
#include "kernels/exl3/exl3_stored_matrix.h"
#include "kernels/exl3/hadamard.h"
#include "kernels/simd_target.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {
namespace {

std::vector<double> NaiveLinear(const StoredMatrix& m,
                                const std::vector<F16>& wq,
                                const float* x,
                                bool with_bias) {
  std::vector<double> xh(static_cast<size_t>(m.k));
  for (size_t i = 0; i < xh.size(); ++i)
    xh[i] = static_cast<double>(x[i]) * static_cast<double>(ToF32(m.suh[i]));
  NaiveHadamard(xh);
  std::vector<double> y(static_cast<size_t>(m.n));
  for (size_t i = 0; i < xh.size(); ++i) {
    for (size_t j = 0; j < y.size(); ++j)
      y[j] += xh[i] * static_cast<double>(ToF32(wq[i * y.size() + j]));
  }
  NaiveHadamard(y);
  for (size_t j = 0; j < y.size(); ++j) {
    y[j] *= static_cast<double>(ToF32(m.svh[j]));
    if (with_bias) y[j] += static_cast<double>(ToF32(m.bias[j]));
  }
  return y;
}

struct Runner {
  explicit Runner(int threads) : pool(threads), arena(64 << 20) {
    launch.pool = &pool;
    launch.arena = &arena;
  }
  ThreadPool pool;
  Arena arena;
  Launch launch;

  std::vector<float> Run(const Exl3Weights& w, std::vector<float>& x, int64_t rows) {
    std::vector<float> y(static_cast<size_t>(rows * w.n()));
    const Exl3LinearParams params = {&w, MakeView(x.data(), rows, w.k()),
                                     MakeView(y.data(), rows, w.n()), Exl3Rounding::kNone};
    Exl3LinearCpu(params, launch);
    return y;
  }
};

// Runs a test body on every SIMD target.
class Exl3OnTarget : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override { ASSERT_TRUE(PinSimdTarget(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(PinSimdTarget("auto").ok()); }
};
INSTANTIATE_TEST_SUITE_P(Targets,
                         Exl3OnTarget,
                         ::testing::ValuesIn(SimdTargets()),
                         [](const auto& target) { return target.param; });

constexpr std::array<Exl3Codebook, 3> kCodebooks = {Exl3Codebook::k3Inst, Exl3Codebook::kMcg,
                                                    Exl3Codebook::kMul1};

TEST(Exl3Codebook, ScalarTablesHaveThePublishedDigests) {
  constexpr std::array<uint64_t, 3> kDigests = {0xfad431e7e9266898u, 0x7bb36b05a3b885a7u,
                                                0x55e1c748ed9f0cd7u};
  for (size_t c = 0; c < kCodebooks.size(); ++c) {
    uint64_t hash = 0xcbf29ce484222325u;
    for (uint32_t s = 0; s < 65536; ++s) {
      const uint16_t bits = Exl3DecodeState(kCodebooks[c], static_cast<uint16_t>(s)).bits;
      hash = (hash ^ (bits & 0xff)) * 0x100000001b3u;
      hash = (hash ^ (bits >> 8)) * 0x100000001b3u;
    }
    EXPECT_EQ(hash, kDigests[c]) << Exl3CodebookName(kCodebooks[c]);
  }
}

// K = 8: the symbols high, low, high, low, ... of a ring make every second state free to choose.
TEST_P(Exl3OnTarget, EveryStateOfEveryCodebookDecodesExactly) {
  for (Exl3Codebook codebook : kCodebooks) {
    int64_t wrong = 0;
    for (uint32_t first = 0; first < 65536; first += 256) {  // a pair of tiles holds 256 chosen
      std::array<uint32_t, 8 * 16> words{};
      for (uint32_t tile = 0; tile < 2; ++tile) {
        for (uint32_t lane = 0; lane < 8; ++lane) {
          for (uint32_t i = 0; i < 8; ++i) {  // a word holds two states
            const uint32_t state = first + 128 * tile + 16 * lane + 2 * i;
            words[i * 16 + 8 * tile + lane] = state << 16 | (state + 1);
          }
        }
      }
      std::array<float, 512> out{};
      Exl3DecodePairTile(words.data(), 8, codebook, out.data());
      for (uint32_t lane = 0; lane < 16; ++lane) {
        for (uint32_t i = 0; i < 16; ++i) {
          const uint32_t q = 2 * i + 1;
          const uint32_t step = (q >> 3) * 4 + (q & 3);
          const float got = out[(2 * step + ((q >> 2) & 1)) * 16 + lane];
          const uint16_t state = static_cast<uint16_t>(first + 16 * lane + i);
          wrong += std::bit_cast<uint32_t>(got) !=
                   std::bit_cast<uint32_t>(ToF32(Exl3DecodeState(codebook, state)));
        }
      }
    }
    EXPECT_EQ(wrong, 0) << Exl3CodebookName(codebook);
  }
}

TEST_P(Exl3OnTarget, DecodeEqualsTheNaiveDecoderForEveryWidth) {
  for (Exl3Codebook codebook : kCodebooks) {
    for (int bits = 1; bits <= 8; ++bits) {
      const StoredMatrix m(static_cast<uint64_t>(100 + bits), 128, 256, bits, codebook);
      const std::vector<F16> want = m.NaiveDecode();
      for (auto form : {Exl3Weights::Form::kTrellis, Exl3Weights::Form::kDecodedF16}) {
        std::vector<F16> got(want.size());
        Exl3Decode(m.Prepare(form), got);
        EXPECT_TRUE(BitEqual<F16>(got, want)) << Exl3CodebookName(codebook) << " K " << bits;
      }
    }
  }
}

TEST_P(Exl3OnTarget, HadamardIsExactOnIntegersAndInItsOrderOtherwise) {
  RandomTensor random(7);
  std::vector<float> v(256);
  for (float& x : v)
    x = static_cast<float>(random.Below(2001) - 1000);
  std::vector<double> want(v.begin(), v.end());
  NaiveHadamard(want);
  std::vector<float> got = v;
  Hadamard128(got.data(), 2);
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_EQ(got[i], std::round(want[i] * std::sqrt(128.0))) << i;

  std::vector<float> rounded = random.NormalF32(128);  // sums that round: the order shows
  std::vector<float> serial = rounded;
  for (size_t h = 1; h < 128; h *= 2) {
    for (size_t j = 0; j < 128; ++j) {
      if ((j & h) != 0) continue;
      const float a = serial[j];
      const float b = serial[j + h];
      serial[j] = a + b;
      serial[j + h] = a - b;
    }
  }
  Hadamard128(rounded.data(), 1);
  EXPECT_TRUE(BitEqual<float>(rounded, serial));
}

TEST_P(Exl3OnTarget, LinearIsNearDoubleForEveryCodebookAndWidth) {
  Runner runner(2);
  for (Exl3Codebook codebook : kCodebooks) {
    for (int bits : {1, 2, 3, 4, 5, 6, 7, 8}) {
      const StoredMatrix m(static_cast<uint64_t>(bits), 256, 384, bits, codebook);
      Exl3Source source = m.Source();
      const bool with_bias = bits % 2 == 0;
      if (with_bias) source.bias = m.bias.data();
      const absl::StatusOr<Exl3Weights> w = Exl3Weights::Prepare(source);
      ASSERT_TRUE(w.ok()) << w.status().ToString();
      const std::vector<F16> wq = m.NaiveDecode();
      const int64_t rows = 1 + bits % 4;
      std::vector<float> x = RandomTensor(static_cast<uint64_t>(bits)).NormalF32(rows * m.k);
      const std::vector<float> y = runner.Run(*w, x, rows);
      for (int64_t r = 0; r < rows; ++r) {
        const std::vector<double> want = NaiveLinear(m, wq, x.data() + r * m.k, with_bias);
        EXPECT_LT(
            RelativeL2<double>(
                std::span(y).subspan(static_cast<size_t>(r * m.n), static_cast<size_t>(m.n)), want),
            1e-6)
            << Exl3CodebookName(codebook) << " K " << bits << " row " << r;
      }
    }
  }
}

// The law: a row's bits depend on the row and the matrix only.
TEST_P(Exl3OnTarget, RowsHaveTheSameBitsAloneTogetherThreadedAndFromTheCopy) {
  for (Exl3Codebook codebook : kCodebooks) {
    const StoredMatrix m(11, 384, 256, 3, codebook);
    const Exl3Weights w = m.Prepare();
    const Exl3Weights copy = m.Prepare(Exl3Weights::Form::kDecodedF16);
    constexpr int64_t kRows = kExl3RowBlock + 9;
    std::vector<float> x = RandomTensor(12).NormalF32(kRows * m.k);
    Runner one(1);
    const std::vector<float> all = one.Run(w, x, kRows);
    for (int threads : {2, 3}) {
      Runner several(threads);
      EXPECT_TRUE(BitEqual<float>(several.Run(w, x, kRows), all)) << threads << " threads";
    }
    EXPECT_TRUE(BitEqual<float>(one.Run(copy, x, kRows), all)) << "f16 copy";
    for (int64_t rows : {1, 2, 3, 4, 5, 6, 7, 13, 64}) {
      for (int64_t first : {int64_t{0}, kRows - rows}) {
        std::vector<float> part(x.begin() + first * m.k, x.begin() + (first + rows) * m.k);
        const auto want = std::span(all).subspan(static_cast<size_t>(first * m.n),
                                                 static_cast<size_t>(rows * m.n));
        EXPECT_TRUE(BitEqual<float>(one.Run(w, part, rows), want)) << rows << " rows";
        EXPECT_TRUE(BitEqual<float>(one.Run(copy, part, rows), want)) << rows << " rows, copy";
      }
    }
  }
}

TEST_P(Exl3OnTarget, SlicesAndBatchesGiveTheBitsOfTheWhole) {
  const StoredMatrix m(21, 256, 512, 5, Exl3Codebook::kMul1);
  const Exl3Weights whole = m.Prepare();
  constexpr int64_t kRows = 3;
  std::vector<float> x = RandomTensor(22).NormalF32(kRows * m.k);
  Runner runner(2);
  const std::vector<float> y = runner.Run(whole, x, kRows);

  // Outputs [128, 384), read in place out of the whole tensor, in one batch with the whole.
  Exl3Source columns = m.Source();
  columns.n = 256;
  columns.trellis += 8 * 16 * m.bits;
  columns.trellis_row_stride = m.n * m.bits;
  columns.svh += 128;
  const absl::StatusOr<Exl3Weights> out_slice = Exl3Weights::Prepare(columns);
  ASSERT_TRUE(out_slice.ok()) << out_slice.status().ToString();
  std::vector<float> y_slice(kRows * 256);
  std::vector<Bf16> y_bf16(static_cast<size_t>(kRows * m.n));
  const std::array<Exl3LinearParams, 2> jobs = {
      Exl3LinearParams{&*out_slice, MakeView(x.data(), kRows, m.k),
                       MakeView(y_slice.data(), kRows, 256), Exl3Rounding::kNone},
      Exl3LinearParams{&whole, MakeView(x.data(), kRows, m.k), MakeView(y_bf16.data(), kRows, m.n),
                       Exl3Rounding::kNone}};
  Exl3LinearBatchCpu({jobs}, runner.launch);
  for (int64_t r = 0; r < kRows; ++r) {
    EXPECT_TRUE(BitEqual<float>(std::span(y_slice).subspan(static_cast<size_t>(r * 256), 256),
                                std::span(y).subspan(static_cast<size_t>(r * m.n + 128), 256)));
  }
  for (size_t i = 0; i < y.size(); ++i)
    ASSERT_EQ(y_bf16[i].bits, ToBf16(y[i]).bits) << i;

  // Inputs split in two: the partial results, each with its own output transform, sum to the whole.
  std::vector<double> sum(y.size());
  for (int64_t rank = 0; rank < 2; ++rank) {
    Exl3Source rows = m.Source();
    rows.k = 128;
    rows.trellis += rank * 8 * m.n * m.bits;
    rows.suh += rank * 128;
    const absl::StatusOr<Exl3Weights> in_slice = Exl3Weights::Prepare(rows);
    ASSERT_TRUE(in_slice.ok()) << in_slice.status().ToString();
    std::vector<float> partial(y.size());
    const Exl3LinearParams params = {
        &*in_slice, ConstTensorView(MakeView(x.data(), kRows, m.k)).Cols(rank * 128, 128),
        MakeView(partial.data(), kRows, m.n), Exl3Rounding::kNone};
    Exl3LinearCpu(params, runner.launch);
    for (size_t i = 0; i < sum.size(); ++i)
      sum[i] += static_cast<double>(partial[i]);
  }
  EXPECT_LT(RelativeL2<double>(y, sum), 1e-6);
}

TEST_P(Exl3OnTarget, Bf16InputPaddingAndLegacySigns) {
  StoredMatrix m(31, 256, 256, 4, Exl3Codebook::kMul1);
  std::vector<uint16_t> su(16), sv(16);
  RandomTensor random(32);
  for (size_t j = 0; j < 16; ++j) {
    su[j] = static_cast<uint16_t>(random.Bits());
    sv[j] = static_cast<uint16_t>(random.Bits());
    for (size_t i = 0; i < 16; ++i) {
      m.suh[16 * j + i] = ToF16((su[j] >> i) & 1 ? -1.0f : 1.0f);
      m.svh[16 * j + i] = ToF16((sv[j] >> i) & 1 ? -1.0f : 1.0f);
    }
  }
  Exl3Source legacy = m.Source();
  legacy.suh = legacy.svh = nullptr;
  legacy.su = su.data();
  legacy.sv = sv.data();
  const absl::StatusOr<Exl3Weights> w = Exl3Weights::Prepare(legacy);
  ASSERT_TRUE(w.ok()) << w.status().ToString();

  // 200 of 256 inputs, 130 of 256 outputs: the rest counts as zeros, or is trimmed.
  constexpr int64_t kRows = 2, kIn = 200, kOut = 130;
  std::vector<Bf16> x = random.NormalBf16(kRows * kIn);
  std::vector<float> padded(kRows * 256);
  for (int64_t i = 0; i < kRows * kIn; ++i)
    padded[static_cast<size_t>(i / kIn * 256 + i % kIn)] = ToF32(x[static_cast<size_t>(i)]);
  Runner runner(1);
  const std::vector<float> want = runner.Run(m.Prepare(), padded, kRows);
  std::vector<float> y(kRows * (kOut + 1), -1.0f);
  TensorView out = MakeView(y.data(), kRows, kOut);
  out.row_stride = kOut + 1;
  Exl3LinearCpu({&*w, MakeView(x.data(), kRows, kIn), out, Exl3Rounding::kNone}, runner.launch);
  for (int64_t r = 0; r < kRows; ++r) {
    EXPECT_TRUE(BitEqual<float>(std::span(y).subspan(static_cast<size_t>(r * (kOut + 1)), kOut),
                                std::span(want).subspan(static_cast<size_t>(r * 256), kOut)));
    EXPECT_EQ(y[static_cast<size_t>(r * (kOut + 1) + kOut)], -1.0f) << "wrote past its columns";
  }
}

TEST(Exl3Weights, RefusesWhatCannotBeAMatrix) {
  const StoredMatrix m(41, 128, 128, 3, Exl3Codebook::kMul1);
  const auto refused = [](const Exl3Source& s) { return !Exl3Weights::Prepare(s).ok(); };
  EXPECT_FALSE(refused(m.Source()));
  Exl3Source s = m.Source();
  s.k = 64;
  EXPECT_TRUE(refused(s));
  s = m.Source();
  s.bits = 9;
  EXPECT_TRUE(refused(s));
  s = m.Source();
  s.svh = nullptr;
  EXPECT_TRUE(refused(s));
  s = m.Source();
  std::vector<F16> nan(128, F16{0x7e00});
  s.suh = nan.data();
  EXPECT_TRUE(refused(s));
}

TEST(Exl3Linear, TakesNoMoreScratchThanItSays) {
  const StoredMatrix m(51, 256, 256, 3, Exl3Codebook::kMul1);
  const Exl3Weights w = m.Prepare();
  for (int64_t rows : {1, 6, 300}) {
    const Exl3ScratchShape shape = {rows, w.k()};
    Arena arena(Exl3LinearScratchBytes(std::span(&shape, 1), 2));
    ThreadPool pool(2);
    Launch launch;
    launch.pool = &pool;
    launch.arena = &arena;
    std::vector<float> x(static_cast<size_t>(rows * w.k()), 1.0f);
    std::vector<float> y(static_cast<size_t>(rows * w.n()));
    Exl3LinearCpu(
        {&w, MakeView(x.data(), rows, w.k()), MakeView(y.data(), rows, w.n()), Exl3Rounding::kNone},
        launch);
    EXPECT_EQ(arena.used_bytes(), 0u);
  }
}

}  // namespace
}  // namespace twinspark
