// Speed of the dense linear (bf16 and f32 weights): GB/s of weights and multiply-adds per second,
// and the share of its bound, the larger of streaming the weights once and the vector operations: a
// multiply-add per row, and two per vector of bf16 weights, which are widened once.
#include "kernels/gemm/linear.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "common/check.h"
#include "kernels/testing/bench_util.h"
#include "kernels/testing/machine_rates.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {
namespace {

void RunCase(const BenchFlags& flags, DenseFormat format, int64_t out, int64_t in, int64_t m) {
  RandomTensor random(1);
  const bool is_f32 = format == DenseFormat::kF32;
  const std::vector<float> f32 = is_f32 ? random.NormalF32(out * in) : std::vector<float>();
  const std::vector<Bf16> bf16 = is_f32 ? std::vector<Bf16>() : random.NormalBf16(out * in);
  DenseSource source;
  source.format = format;
  source.out = out;
  source.in = in;
  source.data = is_f32 ? static_cast<const void*>(f32.data()) : bf16.data();
  absl::StatusOr<DenseWeights> prepared = DenseWeights::Prepare(source);
  CHECK(prepared.ok()) << prepared.status().ToString();
  const LinearWeights w(*std::move(prepared));
  const MachineRates rates = MeasureMachineRates(flags.smoke ? 4096 : w.bytes());
  const std::vector<Bf16> x = random.NormalBf16(m * in);
  std::vector<float> y(static_cast<size_t>(m * out));
  ThreadPool pool(flags.threads);
  Arena arena(LinearScratchBytes(w, m, flags.threads));
  Launch launch;
  launch.pool = &pool;
  launch.arena = &arena;
  const LinearParams params = {&w, MakeView(x.data(), m, in), MakeView(y.data(), m, out),
                               Exl3Rounding::kNone};
  const ThreadPool::Step step(pool);
  const double seconds = MedianSeconds(flags, [&] { LinearCpu(params, launch); });
  const double bytes = static_cast<double>(w.bytes());
  const double fmas = static_cast<double>(out * in * m);
  const double ops =
      fmas / rates.fma_lanes_per_s +
      (is_f32 ? 0.0 : LoadBf16().shift * static_cast<double>(out * in)) / rates.simple_lanes_per_s;
  const double bound = std::max(bytes / rates.read_bytes_per_s, ops) / flags.threads;
  PrintBenchLine(flags,
                 std::string("linear ") + (is_f32 ? "f32 " : "bf16 ") + std::to_string(out) + "x" +
                     std::to_string(in) + " m=" + std::to_string(m),
                 seconds, {{"GB/s", bytes / seconds * 1e-9}, {"GFMA/s", fmas / seconds * 1e-9}},
                 bound / seconds);
}

void RunAll(const BenchFlags& flags) {
  if (flags.smoke) {
    RunCase(flags, DenseFormat::kBf16, 64, 64, 1);
    RunCase(flags, DenseFormat::kF32, 64, 64, 13);
    return;
  }
  for (int64_t m : {1, 6, 64, 192})
    RunCase(flags, DenseFormat::kBf16, 4096, 4096, m);
  for (int64_t m : {1, 6, 64})
    RunCase(flags, DenseFormat::kF32, 2048, 2048, m);
  for (int64_t m : {1, 6, 64})
    RunCase(flags, DenseFormat::kF32, 384, 5120, m);  // the router
  for (int64_t m : {1, 6})
    RunCase(flags, DenseFormat::kBf16, 256, 256, m);
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::BenchMain(argc, argv, twinspark::RunAll);
}
