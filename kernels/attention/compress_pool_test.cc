// The compressor's pooling against double, with groups that lie in the step, in the carry ring and
// across the two.
#include "kernels/attention/compress_pool.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/testing/op_fixture.h"

namespace twinspark {
namespace {

constexpr size_t kArenaBytes = size_t{1} << 16;

TEST(CompressPool, SoftmaxPerChannelOverTheTokensOfAGroup) {
  OpContext contexts[3] = {OpContext(1, kArenaBytes), OpContext(2, kArenaBytes),
                           OpContext(3, kArenaBytes)};
  OnEverySimdTarget([&] {
    RandomTensor random(51);
    for (const int ratio : {1, 2, 3}) {
      for (const int64_t n : {1, 7, 16, 50, 128}) {
        Matrix step(9, 2 * n, DType::kF32), carry_values(8, 2 * n, DType::kF32);
        step.Fill(random, 3.0f);
        carry_values.Fill(random, 3.0f);
        step.set(0, n, 200.0f);  // one score far above the others
        step.set(1, n, -200.0f);
        std::vector<float> carry = carry_values.Values();
        std::vector<int64_t> sources;
        const int64_t num_groups = 5;
        for (int64_t i = 0; i < num_groups * ratio; ++i) {
          sources.push_back(random.Below(3) == 0 ? -1 - random.Below(8) : random.Below(9));
        }
        std::vector<double> want;
        for (int64_t g = 0; g < num_groups; ++g) {
          for (int64_t c = 0; c < n; ++c) {
            double weighted = 0, sum = 0;
            for (int i = 0; i < ratio; ++i) {
              const int64_t source = sources[static_cast<size_t>(g * ratio + i)];
              const Matrix& from = source >= 0 ? step : carry_values;
              const int64_t row = source >= 0 ? source : -1 - source;
              const double e = std::exp(static_cast<double>(from.at(row, n + c)));
              sum += e;
              weighted += e * static_cast<double>(from.at(row, c));
            }
            want.push_back(weighted / sum);
          }
        }
        for (OpContext& context : contexts) {
          Matrix out(num_groups, n, DType::kF32);
          CompressPoolCpu({.kv_score = step.view(),
                           .carry = {carry.data(), CacheFormat::kF32, 8, 2 * n},
                           .ratio = ratio,
                           .sources = sources.data(),
                           .out = out.view()},
                          context.launch());
          EXPECT_TRUE(Near(out, want, 3e-6, 2e-6)) << ratio << " " << n;
          EXPECT_TRUE(out.PaddingIntact());
        }
      }
    }
  });
}

}  // namespace
}  // namespace twinspark
