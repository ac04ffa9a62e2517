// Stream mixes against double: collapse with its rounding, the 24 mixes with Sinkhorn at few and
// many rounds, the post mix (sum over the first index), the mean. Rows must not depend on company.
#include "kernels/hyper_connection/hyper_connection.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/testing/op_fixture.h"

namespace twinspark {
namespace {

double Sigmoid(double x) {
  return 1 / (1 + std::exp(-x));
}

struct Mixes {
  std::vector<double> pre, post, comb;
};

// The specification's HCmix, written out.
Mixes NaiveMix(const Matrix& s,
               const Matrix& fn,
               const Matrix& base,
               const Matrix& scale,
               int n,
               int iters,
               double eps) {
  Mixes out;
  for (int64_t t = 0; t < s.rows(); ++t) {
    double square = 0;
    for (int64_t j = 0; j < s.cols(); ++j)
      square += static_cast<double>(s.at(t, j)) * s.at(t, j);
    const double r = 1 / std::sqrt(square / static_cast<double>(s.cols()) + 1e-20);
    std::vector<double> m;
    for (int64_t i = 0; i < fn.rows(); ++i) {
      double dot = 0;
      for (int64_t j = 0; j < s.cols(); ++j)
        dot += static_cast<double>(fn.at(i, j)) * s.at(t, j);
      m.push_back(dot * r);
    }
    const auto term = [&](int i, int which) {
      return m[static_cast<size_t>(i)] * scale.at(0, which) + base.at(0, i);
    };
    for (int i = 0; i < n; ++i)
      out.pre.push_back(Sigmoid(term(i, 0)) + eps);
    for (int i = 0; i < n; ++i)
      out.post.push_back(2 * Sigmoid(term(n + i, 1)));
    std::vector<std::vector<double>> k(static_cast<size_t>(n),
                                       std::vector<double>(static_cast<size_t>(n)));
    for (int i = 0; i < n; ++i) {
      double sum = 0;
      for (int j = 0; j < n; ++j)
        sum += std::exp(term(2 * n + n * i + j, 2));
      for (int j = 0; j < n; ++j) {
        k[static_cast<size_t>(i)][static_cast<size_t>(j)] =
            std::exp(term(2 * n + n * i + j, 2)) / sum + eps;
      }
    }
    const auto columns = [&] {
      for (size_t j = 0; j < k.size(); ++j) {
        double sum = eps;
        for (size_t i = 0; i < k.size(); ++i)
          sum += k[i][j];
        for (size_t i = 0; i < k.size(); ++i)
          k[i][j] /= sum;
      }
    };
    columns();
    for (int round = 0; round < iters - 1; ++round) {
      for (auto& row : k) {
        double sum = eps;
        for (const double x : row)
          sum += x;
        for (double& x : row)
          x /= sum;
      }
      columns();
    }
    for (const auto& row : k)
      out.comb.insert(out.comb.end(), row.begin(), row.end());
  }
  return out;
}

TEST(HcMix, NearDoubleForAnyNumberOfRoundsAndStreams) {
  OpContext context(2);
  OnEverySimdTarget([&] {
    RandomTensor random(61);
    for (const int n : {1, 2, 4}) {
      for (const int64_t d : {5, 64, 131}) {
        for (const int iters : {1, 3, 20}) {
          Matrix s(13, n * d, DType::kBf16), fn(2 * n + n * n, n * d, DType::kF32);
          Matrix base(1, fn.rows(), DType::kF32), scale(1, 3, DType::kF32);
          s.Fill(random);
          fn.Fill(random, 0.2f);
          base.Fill(random);
          scale.Fill(random);
          Matrix pre(13, n, DType::kF32), post(13, n, DType::kF32), comb(13, n * n, DType::kF32);
          HcMixCpu({.streams = s.view(),
                    .fn = fn.view(),
                    .base = base.view(),
                    .scale = scale.view(),
                    .sinkhorn_iters = iters,
                    .norm_eps = 1e-20f,
                    .hc_eps = 1e-6f,
                    .pre = pre.view(),
                    .post = post.view(),
                    .comb = comb.view()},
                   context.launch());
          const Mixes want = NaiveMix(s, fn, base, scale, n, iters, 1e-6);
          EXPECT_TRUE(Near(pre, want.pre, 2e-6, 0));
          EXPECT_TRUE(Near(post, want.post, 4e-6, 0));
          EXPECT_TRUE(Near(comb, want.comb, 4e-6, 0)) << n << " streams, " << iters << " rounds";
          EXPECT_TRUE(comb.PaddingIntact());
        }
      }
    }
  });
}

TEST(CollapseNorm, RoundsTheCollapseBeforeTheNorm) {
  OpContext context(2);
  OnEverySimdTarget([&] {
    RandomTensor random(62);
    for (const DType type : {DType::kF32, DType::kBf16}) {
      for (const int64_t d : {3, 16, 100}) {
        Matrix s(11, 4 * d, type), pre(11, 4, DType::kF32), weight(1, d, DType::kF32);
        Matrix out(11, d, DType::kF32), collapsed(11, d, type), only(11, d, DType::kF32);
        s.Fill(random);
        pre.Fill(random);
        weight.Fill(random);
        CollapseNormParams params{.streams = s.view(),
                                  .pre = pre.view(),
                                  .weight = weight.view(),
                                  .eps = 1e-20f,
                                  .out = out.view(),
                                  .collapsed = collapsed.view()};
        CollapseNormCpu(params, context.launch());
        std::vector<double> want_collapsed, want;
        for (int64_t t = 0; t < 11; ++t) {
          double square = 0;
          for (int64_t j = 0; j < d; ++j) {
            double sum = 0;
            for (int64_t c = 0; c < 4; ++c)
              sum += static_cast<double>(pre.at(t, c)) * s.at(t, c * d + j);
            want_collapsed.push_back(sum);
            square += static_cast<double>(collapsed.at(t, j)) * collapsed.at(t, j);
          }
          const double r = 1 / std::sqrt(square / static_cast<double>(d) + 1e-20);
          for (int64_t j = 0; j < d; ++j)
            want.push_back(weight.at(0, j) * collapsed.at(t, j) * r);
        }
        EXPECT_TRUE(Near(collapsed, want_collapsed, 1e-6, 1e-6));
        EXPECT_TRUE(Near(out, want, 1e-6, 3e-6));
        params.collapsed = {};
        params.out = only.view();
        CollapseNormCpu(params, context.launch());
        EXPECT_TRUE(SameBits(only, out));
      }
    }
  });
}

TEST(HcPost, SumsOverTheFirstIndexOfComb) {
  OpContext context(2);
  OnEverySimdTarget([&] {
    RandomTensor random(63);
    for (const DType type : {DType::kF32, DType::kBf16}) {
      for (const int64_t d : {1, 18, 64}) {
        Matrix y(7, d, DType::kF32), s(7, 4 * d, type), out(7, 4 * d, type);
        Matrix post(7, 4, DType::kF32), comb(7, 16, DType::kF32);
        y.Fill(random);
        s.Fill(random);
        post.Fill(random);
        comb.Fill(random);
        std::vector<double> want;
        for (int64_t t = 0; t < 7; ++t) {
          for (int64_t j = 0; j < 4; ++j) {
            for (int64_t c = 0; c < d; ++c) {
              double sum = static_cast<double>(post.at(t, j)) * y.at(t, c);
              for (int64_t i = 0; i < 4; ++i) {
                sum += static_cast<double>(comb.at(t, 4 * i + j)) * s.at(t, i * d + c);
              }
              want.push_back(sum);
            }
          }
        }
        HcPostParams params{.y = y.view(),
                            .streams = s.view(),
                            .post = post.view(),
                            .comb = comb.view(),
                            .out = out.view()};
        HcPostCpu(params, context.launch());
        EXPECT_TRUE(Near(out, want, 2e-6, 1e-6));
        params.out = s.view();
        HcPostCpu(params, context.launch());
        EXPECT_TRUE(SameBits(s, out)) << "in place";
      }
    }
  });
}

TEST(StreamMean, IsThePlainMean) {
  RandomTensor random(64);
  OpContext context(1);
  Matrix s(3, 4 * 21, DType::kBf16), out(3, 21, DType::kF32);
  s.Fill(random);
  StreamMeanCpu({.streams = s.view(), .num_streams = 4, .out = out.view()}, context.launch());
  std::vector<double> want;
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t j = 0; j < 21; ++j) {
      double sum = 0;
      for (int64_t c = 0; c < 4; ++c)
        sum += s.at(t, c * 21 + j);
      want.push_back(sum / 4);
    }
  }
  EXPECT_TRUE(Near(out, want, 1e-6, 1e-6));
}

TEST(HyperConnections, RowsDoNotDependOnCompanyOrThreads) {
  RandomTensor random(65);
  constexpr int64_t kRows = 127, kD = 72;
  Matrix s(kRows, 4 * kD, DType::kBf16), fn(24, 4 * kD, DType::kF32), base(1, 24, DType::kF32);
  Matrix scale(1, 3, DType::kF32), weight(1, kD, DType::kF32);
  s.Fill(random);
  fn.Fill(random, 0.2f);
  base.Fill(random);
  scale.Fill(random);
  weight.Fill(random);
  struct Result {
    Matrix pre{kRows, 4, DType::kF32}, post{kRows, 4, DType::kF32}, comb{kRows, 16, DType::kF32};
    Matrix x{kRows, kD, DType::kBf16}, out{kRows, 4 * kD, DType::kBf16};
  };
  const auto run = [&](Result& r, int64_t first, int64_t count, const Launch& launch) {
    const auto rows = [&](Matrix& m) { return m.view().Rows(first, count); };
    HcMixCpu({.streams = rows(s),
              .fn = fn.view(),
              .base = base.view(),
              .scale = scale.view(),
              .sinkhorn_iters = 20,
              .norm_eps = 1e-20f,
              .hc_eps = 1e-6f,
              .pre = rows(r.pre),
              .post = rows(r.post),
              .comb = rows(r.comb)},
             launch);
    CollapseNormCpu({.streams = rows(s),
                     .pre = rows(r.pre),
                     .weight = weight.view(),
                     .eps = 1e-20f,
                     .out = rows(r.x)},
                    launch);
    HcPostCpu({.y = rows(r.x),
               .streams = rows(s),
               .post = rows(r.post),
               .comb = rows(r.comb),
               .out = rows(r.out)},
              launch);
  };
  OnEverySimdTarget([&] {
    Result alone;
    OpContext one(1);
    for (int64_t t = 0; t < kRows; ++t)
      run(alone, t, 1, one.launch());
    for (const int threads : {1, 2, 3}) {
      OpContext context(threads);
      Result together;
      run(together, 0, kRows, context.launch());
      EXPECT_TRUE(SameBits(together.pre, alone.pre));
      EXPECT_TRUE(SameBits(together.comb, alone.comb));
      EXPECT_TRUE(SameBits(together.out, alone.out));
    }
  });
}

}  // namespace
}  // namespace twinspark
