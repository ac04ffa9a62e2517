// The three stream ops at the demo's and the released model's widths. Bounds: the larger
// of the bytes at streaming speed and the vector operations: for the mixes their multiply-adds, for
// the others mostly conversions of bf16 (a value of x meets four streams in, or four in and out).
#include "kernels/hyper_connection/hyper_connection.h"

#include <string>
#include <vector>

#include "kernels/testing/bench_util.h"
#include "kernels/testing/machine_rates.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {
namespace {

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
  const auto report = [&](const char* op, double seconds, double bytes, double fma, double ops) {
    const double work = fma / rates.fma_lanes_per_s +
                        ops * static_cast<double>(rows * d) / rates.simple_lanes_per_s;
    const double bound = std::max(bytes / rates.read_bytes_per_s, work);
    PrintBenchLine(
        flags, std::string(op) + " m=" + std::to_string(rows) + " d=" + std::to_string(d), seconds,
        {{"GB/s", bytes / seconds * 1e-9}, {"us/row", seconds / static_cast<double>(rows) * 1e6}},
        bound / flags.threads / seconds);
  };
  const ThreadPool::Step step(pool);
  report("hc_mix",
         MedianSeconds(
             flags,
             [&] {
               HcMixCpu({.streams = s,
                         .fn = MakeView(static_cast<const float*>(fn.data()), kMixes, kStreams * d),
                         .base = MakeView(static_cast<const float*>(base.data()), 1, kMixes),
                         .scale = MakeView(static_cast<const float*>(scale.data()), 1, 3),
                         .sinkhorn_iters = 20,
                         .norm_eps = 1e-20f,
                         .hc_eps = 1e-6f,
                         .pre = pre_view,
                         .post = post_view,
                         .comb = comb_view},
                        launch);
             }),
         stream_bytes + static_cast<double>(fn.size()) * 4,
         static_cast<double>(rows * kMixes * kStreams * d), 0);
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
         stream_bytes * 1.25, 0, kStreams * (kBf16LoadOps + 1) + kBf16StoreOps + 3 + kBf16StoreOps);
  report("hc_post",
         MedianSeconds(
             flags,
             [&] {
               HcPostCpu(
                   {.y = x_view, .streams = s, .post = post_view, .comb = comb_view, .out = s},
                   launch);
             }),
         stream_bytes * 2.25, static_cast<double>(rows * kStreams * (kStreams + 1) * d),
         (1 + kStreams) * kBf16LoadOps + kStreams * kBf16StoreOps);
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
