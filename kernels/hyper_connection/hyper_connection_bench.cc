// The stream ops at the demo's and the released model's widths. Bounds as in machine_rates.h; one
// row of mixes also waits for its Sinkhorn rounds.
#include "kernels/hyper_connection/hyper_connection.h"

#include <string>
#include <vector>

#include "kernels/testing/bench_util.h"
#include "kernels/testing/machine_rates.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {
namespace {

constexpr int kSinkhornIters = 20;

// The rounds of one row: every line waits for the sum of four values, a division and a product of
// the one before.
double SinkhornChainSeconds(const BenchFlags& flags) {
  volatile float start = 0.3f;
  return MedianSeconds(flags, [&] {
    float x = start;
    for (int half = 0; half < 2 * kSinkhornIters - 1; ++half)
      x *= 1.0f / (((x + 0.1f) + 0.2f) + 0.3f + 1e-6f);
    start = x;
  });
}

void RunCase(const BenchFlags& flags, int64_t rows, int64_t d) {
  RandomTensor random(1);
  constexpr int64_t kStreams = 4, kMixes = 24;
  std::vector<Bf16> streams = random.NormalBf16(rows * kStreams * d),
                    x(static_cast<size_t>(rows * d));
  std::vector<float> fn = random.NormalF32(kMixes * kStreams * d, 0.1f), base(kMixes),
                     scale(3, 0.1f);
  std::vector<float> weight(static_cast<size_t>(d), 1.0f),
      pre(static_cast<size_t>(rows * kStreams));
  std::vector<float> post(pre.size()), comb(pre.size() * kStreams);
  ThreadPool pool(flags.threads);
  Arena arena(static_cast<size_t>(flags.threads * (d + 64)) * sizeof(float));
  const Launch launch{.pool = &pool, .arena = &arena};
  const TensorView s = MakeView(streams.data(), rows, kStreams * d);
  const TensorView pre_view = MakeView(pre.data(), rows, kStreams);
  const TensorView post_view = MakeView(post.data(), rows, kStreams);
  const TensorView comb_view = MakeView(comb.data(), rows, kStreams * kStreams);
  const TensorView x_view = MakeView(x.data(), rows, d);
  const double stream_bytes = static_cast<double>(rows * kStreams * d) * 2;
  const MachineRates rates = MeasureMachineRates(flags.smoke ? 4096 : fn.size() * sizeof(float));
  const auto report = [&](const char* op, double seconds, const OpWork& work) {
    PrintBenchLine(
        flags, std::string(op) + " m=" + std::to_string(rows) + " d=" + std::to_string(d), seconds,
        {{"GB/s", (work.read + work.written) / seconds * 1e-9},
         {"us/row", seconds / static_cast<double>(rows) * 1e6}},
        BoundSeconds(rates, work, flags.threads) / seconds);
  };
  const double values = static_cast<double>(rows * d);
  const double norm_chain_s = rows == 1 ? rates.norm_chain_s : 0;
  const ThreadPool::Step step(pool);
  report("hc_mix",
         MedianSeconds(
             flags,
             [&] {
               HcMixCpu({.streams = s,
                         .fn = MakeView(static_cast<const float*>(fn.data()), kMixes, kStreams * d),
                         .base = MakeView(static_cast<const float*>(base.data()), 1, kMixes),
                         .scale = MakeView(static_cast<const float*>(scale.data()), 1, 3),
                         .sinkhorn_iters = kSinkhornIters,
                         .norm_eps = 1e-20f,
                         .hc_eps = 1e-6f,
                         .pre = pre_view,
                         .post = post_view,
                         .comb = comb_view},
                        launch);
             }),
         (LoadWords() + LoadBf16() + OpWork{.fma = 1.0 + kMixes}).Times(values * kStreams) +
             OpWork{.read = stream_bytes + static_cast<double>(fn.size()) * 4,
                    .chain_s = norm_chain_s + (rows == 1 ? SinkhornChainSeconds(flags) : 0)});
  report("collapse_norm",
         MedianSeconds(flags,
                       [&] {
                         CollapseNormCpu(
                             {.streams = s,
                              .pre = pre_view,
                              .weight = MakeView(static_cast<const float*>(weight.data()), 1, d),
                              .eps = 1e-20f,
                              .out = x_view},
                             launch);
                       }),
         ((LoadWords() + OpWork{.fma = 1}).Times(kStreams) + StoreWords() + LoadWords() +
          LoadBf16() + StoreBf16(rates) + OpWork{.fma = 3})
                 .Times(values) +
             OpWork{.read = stream_bytes + static_cast<double>(d) * 4,
                    .written = stream_bytes / 4,
                    .chain_s = norm_chain_s});
  report("hc_post",
         MedianSeconds(
             flags,
             [&] {
               HcPostCpu(
                   {.y = x_view, .streams = s, .post = post_view, .comb = comb_view, .out = s},
                   launch);
             }),
         (LoadWords().Times(1 + kStreams) + StoreWords().Times(kStreams) +
          OpWork{.fma = kStreams * (kStreams + 1)})
                 .Times(values) +
             OpWork{.read = stream_bytes * 1.25, .written = stream_bytes});
  report(
      "stream_mean",
      MedianSeconds(
          flags,
          [&] { StreamMeanCpu({.streams = s, .num_streams = kStreams, .out = x_view}, launch); }),
      (LoadWords().Times(kStreams) + StoreWords() + OpWork{.fma = 1, .simple = kStreams - 1})
              .Times(values) +
          OpWork{.read = stream_bytes, .written = stream_bytes / 4});
}

void RunAll(const BenchFlags& flags) {
  if (flags.smoke) {
    RunCase(flags, 3, 64);
    return;
  }
  for (const int64_t d : {256, 5120}) {
    for (const int64_t rows : {1, 6, 64})
      RunCase(flags, rows, d);
  }
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::BenchMain(argc, argv, twinspark::RunAll);
}
