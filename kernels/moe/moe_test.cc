// Router, activation and the expert sum against double; the expert sum also with two partials and
// in any grouping of rows, bit for bit.
#include "kernels/moe/moe.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/moe/router.h"
#include "kernels/moe/swiglu.h"
#include "kernels/testing/op_fixture.h"

namespace twinspark {
namespace {

struct Routing {
  Routing(int64_t rows, int chosen)
      : num_chosen(chosen),
        ids(static_cast<size_t>(rows * chosen), -1),
        weights(static_cast<size_t>(rows * chosen), -1.0f) {}
  TensorView Ids() {
    return MakeView(ids.data(), static_cast<int64_t>(ids.size()) / num_chosen, num_chosen);
  }
  TensorView Weights() {
    return MakeView(weights.data(), static_cast<int64_t>(ids.size()) / num_chosen, num_chosen);
  }
  bool operator==(const Routing&) const = default;
  int num_chosen;
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

double SqrtSoftplus(double z) {
  return std::sqrt(std::max(z, 0.0) + std::log1p(std::exp(-std::abs(z))));
}

TEST(Router, ChoosesByBiasedScoreAndWeighsByScore) {
  OnEverySimdTarget([&] {
    RandomTensor random(91);
    for (const int64_t experts : {3, 8, 37, 384}) {
      constexpr int64_t kRows = 19, kD = 77;
      Matrix x(kRows, kD, DType::kBf16), gate(experts, kD, DType::kF32),
          scores(kRows, experts, DType::kF32);
      x.Fill(random);
      gate.Fill(random, 0.3f);
      for (int64_t c = 0; c < kD; ++c)
        gate.set(1, c, gate.at(0, c));  // equal scores
      std::vector<float> bias = random.NormalF32(experts, 0.2f),
                         image_bias = random.NormalF32(experts, 0.2f);
      bias[1] = bias[0];
      std::vector<uint8_t> mask(kRows, 0);
      mask[4] = 1;
      const int chosen = static_cast<int>(std::min<int64_t>(experts, 6));
      RouterParams params{.x = x.view(),
                          .gate = gate.view(),
                          .bias = bias.data(),
                          .image_bias = image_bias.data(),
                          .image_mask = mask.data(),
                          .num_chosen = chosen,
                          .scaling_factor = 1.5f,
                          .ids = {},
                          .weights = {},
                          .scores = scores.view()};
      Routing first(kRows, chosen);
      for (const int threads : {1, 2, 3}) {
        OpContext context(threads);
        Routing routing(kRows, chosen), alone(kRows, chosen);
        params.ids = routing.Ids();
        params.weights = routing.Weights();
        RouterCpu(params, context.launch());
        for (int64_t t = 0; t < kRows; ++t) {
          RouterParams one = params;
          one.x = one.x.Rows(t, 1);
          one.image_mask += t;
          one.ids = alone.Ids().Rows(t, 1);
          one.weights = alone.Weights().Rows(t, 1);
          one.scores = {};
          RouterCpu(one, context.launch());
        }
        EXPECT_TRUE(alone == routing) << threads;
        if (threads == 1) first = routing;
        EXPECT_TRUE(first == routing) << threads;
      }
      for (int64_t t = 0; t < kRows; ++t) {
        const std::vector<float>& b = mask[static_cast<size_t>(t)] != 0 ? image_bias : bias;
        std::vector<int32_t> order;
        for (int32_t e = 0; e < experts; ++e) {
          double dot = 0;
          for (int64_t c = 0; c < kD; ++c)
            dot += static_cast<double>(x.at(t, c)) * static_cast<double>(gate.at(e, c));
          EXPECT_NEAR(scores.at(t, e), SqrtSoftplus(dot), 1e-5);
          order.push_back(e);
        }
        std::stable_sort(order.begin(), order.end(), [&](int32_t i, int32_t j) {
          return scores.at(t, i) + b[static_cast<size_t>(i)] >
                 scores.at(t, j) + b[static_cast<size_t>(j)];
        });
        double sum = 0;
        for (int k = 0; k < chosen; ++k)
          sum += static_cast<double>(scores.at(t, order[static_cast<size_t>(k)]));
        for (int k = 0; k < chosen; ++k) {
          const size_t at = static_cast<size_t>(t * chosen + k);
          EXPECT_EQ(first.ids[at], order[static_cast<size_t>(k)]);
          EXPECT_NEAR(first.weights[at],
                      1.5 * static_cast<double>(scores.at(t, first.ids[at])) / sum, 1e-6);
        }
      }
    }
  });
}

TEST(Router, ExtremeLogitsGiveFiniteWeights) {
  OpContext context(1);
  Matrix x(2, 4, DType::kF32), gate(3, 4, DType::kF32);
  for (int64_t c = 0; c < 4; ++c) {
    x.set(0, c, -100);
    x.set(1, c, 100);
    for (int64_t e = 0; e < 3; ++e)
      gate.set(e, c, 10);
  }
  const std::vector<float> bias(3, 0.0f);
  Routing routing(2, 2);
  RouterCpu({.x = x.view(),
             .gate = gate.view(),
             .bias = bias.data(),
             .num_chosen = 2,
             .scaling_factor = 1.5f,
             .ids = routing.Ids(),
             .weights = routing.Weights()},
            context.launch());
  EXPECT_EQ(routing.ids, (std::vector<int32_t>{0, 1, 0, 1}));
  EXPECT_EQ(routing.weights[0], 0);  // all scores underflow: 0 / 1e-20
  EXPECT_NEAR(routing.weights[2], 0.75, 1e-6);
}

TEST(SwiGlu, ClampsBeforeSilu) {
  OpContext context(2);
  OnEverySimdTarget([&] {
    RandomTensor random(92);
    for (const int64_t n : {1, 9, 64, 100}) {
      for (const DType type : {DType::kF32, DType::kBf16}) {
        Matrix gate(11, n, type), up(11, n, type), out(11, n, type);
        gate.Fill(random, 8.0f);
        up.Fill(random, 8.0f);
        gate.set(0, 0, -500.0f);
        up.set(1, 0, 500.0f);
        std::vector<double> want;
        for (int64_t t = 0; t < 11; ++t) {
          for (int64_t c = 0; c < n; ++c) {
            const double g = std::min(static_cast<double>(gate.at(t, c)), 10.0);
            const double u = std::clamp(static_cast<double>(up.at(t, c)), -10.0, 10.0);
            want.push_back(g / (1 + std::exp(-g)) * u);
          }
        }
        SwiGluCpu({.gate = gate.view(), .up = up.view(), .limit = 10.0f, .out = out.view()},
                  context.launch());
        EXPECT_TRUE(Near(out, want, 1e-6, 2e-6));
        EXPECT_TRUE(out.PaddingIntact());
      }
    }
  });
}

// A small layer of dense experts.
class Layer {
 public:
  static constexpr int64_t kD = 48, kInner = 64;
  static constexpr int kExperts = 5;

  explicit Layer(int num_partials) {
    RandomTensor random(93);
    const int64_t part = kInner / num_partials;
    for (int e = 0; e <= kExperts; ++e) {
      gate_.push_back(random.NormalF32(kInner * kD, 0.3f));
      up_.push_back(random.NormalF32(kInner * kD, 0.3f));
      down_.push_back(random.NormalF32(kD * kInner, 0.3f));
      weights_.push_back(Dense(gate_.back(), kInner, kD, 0, kD));
      weights_.push_back(Dense(up_.back(), kInner, kD, 0, kD));
      for (int p = 0; p < num_partials; ++p)
        weights_.push_back(Dense(down_.back(), kD, part, p * part, kInner));
    }
    const size_t each = static_cast<size_t>(2 + num_partials);
    for (size_t e = 0; e <= kExperts; ++e) {
      ExpertWeights w{.gate = &weights_[e * each], .up = &weights_[e * each + 1]};
      for (size_t p = 0; p < static_cast<size_t>(num_partials); ++p)
        w.down[p] = &weights_[e * each + 2 + p];
      experts_.push_back(w);
    }
  }

  const ExpertWeights* experts() const { return experts_.data(); }
  const ExpertWeights* shared() const { return &experts_.back(); }

  // Adds weight * expert(x) to out.
  void AddNaive(
      size_t e, const Matrix& x, int64_t t, double weight, std::vector<double>& out) const {
    std::vector<double> a;
    for (int64_t i = 0; i < kInner; ++i) {
      double g = 0, u = 0;
      for (int64_t c = 0; c < kD; ++c) {
        const size_t at = static_cast<size_t>(i * kD + c);
        g += static_cast<double>(gate_[e][at]) * x.at(t, c);
        u += static_cast<double>(up_[e][at]) * x.at(t, c);
      }
      g = std::min(g, 10.0);
      a.push_back(g / (1 + std::exp(-g)) * std::clamp(u, -10.0, 10.0));
    }
    for (int64_t j = 0; j < kD; ++j) {
      double sum = 0;
      for (int64_t i = 0; i < kInner; ++i) {
        sum += static_cast<double>(down_[e][static_cast<size_t>(j * kInner + i)]) *
               a[static_cast<size_t>(i)];
      }
      out[static_cast<size_t>(j)] += weight * sum;
    }
  }

 private:
  static LinearWeights Dense(
      const std::vector<float>& data, int64_t out, int64_t in, int64_t first, int64_t stride) {
    auto weights = DenseWeights::Prepare({.format = DenseFormat::kF32,
                                          .out = out,
                                          .in = in,
                                          .data = data.data() + first,
                                          .row_stride = stride});
    CHECK(weights.ok()) << weights.status().ToString();
    return LinearWeights(*std::move(weights));
  }

  std::vector<std::vector<float>> gate_, up_, down_;
  std::vector<LinearWeights> weights_;
  std::vector<ExpertWeights> experts_;
};

TEST(Moe, SumsExpertsInFloatWhateverTheGrouping) {
  constexpr int64_t kRows = 203;
  RandomTensor random(94);
  Matrix x(kRows, Layer::kD, DType::kF32);
  x.Fill(random);
  Routing routing(kRows, 2);
  for (int64_t t = 0; t < kRows; ++t) {
    const int32_t a = static_cast<int32_t>(random.Below(4));
    routing.ids[static_cast<size_t>(2 * t)] = a + 1;  // expert 0 stays without rows
    routing.ids[static_cast<size_t>(2 * t + 1)] =
        (a + 1 + static_cast<int32_t>(random.Below(3))) % 4 + 1;
    routing.weights[static_cast<size_t>(2 * t)] = random.Uniform(0, 1);
    routing.weights[static_cast<size_t>(2 * t + 1)] = random.Uniform(0, 1);
  }
  const Layer one_part(1), two_parts(2);
  const auto run = [&](const Layer& layer, int partials, Matrix* out, int64_t first, int64_t count,
                       const Launch& launch) {
    MoeParams params{.x = x.view().Rows(first, count),
                     .ids = routing.Ids().Rows(first, count),
                     .weights = routing.Weights().Rows(first, count),
                     .experts = layer.experts(),
                     .num_experts = Layer::kExperts,
                     .shared = layer.shared(),
                     .inner = Layer::kInner,
                     .limit = 10.0f,
                     .gate_up_dtype = DType::kF32,
                     .activation_dtype = DType::kF32,
                     .num_partials = partials,
                     .out = {}};
    for (int p = 0; p < partials; ++p)
      params.out[p] = out[p].view().Rows(first, count);
    MoeCpu(params, launch);
  };
  OnEverySimdTarget([&] {
    Matrix whole(kRows, Layer::kD, DType::kF32);
    Matrix parts[2] = {Matrix(kRows, Layer::kD, DType::kF32),
                       Matrix(kRows, Layer::kD, DType::kF32)};
    OpContext one(1);
    run(one_part, 1, &whole, 0, kRows, one.launch());
    run(two_parts, 2, parts, 0, kRows, one.launch());
    std::vector<double> want;
    for (int64_t t = 0; t < kRows; ++t) {
      std::vector<double> row(Layer::kD, 0.0);
      for (size_t k = 0; k < 2; ++k) {
        const size_t at = static_cast<size_t>(2 * t) + k;
        one_part.AddNaive(static_cast<size_t>(routing.ids[at]), x, t, routing.weights[at], row);
      }
      one_part.AddNaive(Layer::kExperts, x, t, 1, row);
      want.insert(want.end(), row.begin(), row.end());
    }
    EXPECT_TRUE(Near(whole, want, 2e-4, 2e-5));
    Matrix sum(kRows, Layer::kD, DType::kF32);
    for (int64_t t = 0; t < kRows; ++t) {
      for (int64_t c = 0; c < Layer::kD; ++c)
        sum.set(t, c, parts[0].at(t, c) + parts[1].at(t, c));
    }
    EXPECT_TRUE(Near(sum, want, 2e-4, 2e-5));
    for (const int threads : {1, 2, 3}) {
      OpContext context(threads);
      Matrix again(kRows, Layer::kD, DType::kF32), alone(kRows, Layer::kD, DType::kF32);
      run(one_part, 1, &again, 0, kRows, context.launch());
      for (int64_t t = 0; t < kRows; ++t)
        run(one_part, 1, &alone, t, 1, context.launch());
      EXPECT_TRUE(SameBits(again, whole)) << threads;
      EXPECT_TRUE(SameBits(alone, whole)) << threads;
    }
  });
}

}  // namespace
}  // namespace twinspark
