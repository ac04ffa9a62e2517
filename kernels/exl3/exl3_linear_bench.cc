// Speed of the EXL3 linear: decoded weights per second (k * n / time, whatever m), both Hadamard
// transforms included, and the share of its bound. The bound is the larger of two times on one core
// times the threads: the bytes of the matrix at streaming speed, and the vector operations:
// kMul1DecodeOps simple ones per vector of weights and one multiply-add per row. See README.md.
#include "kernels/exl3/exl3_linear.h"

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

#include "common/check.h"
#include "kernels/testing/bench_util.h"
#include "kernels/testing/machine_rates.h"
#include "kernels/testing/random_exl3.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {
namespace {

struct Case {
  int64_t k, n;
  int bits;
  int64_t m;
  Exl3Weights::Form form = Exl3Weights::Form::kTrellis;
};

void RunCase(const BenchFlags& flags, const Case& c) {
  const Exl3Weights w = RandomExl3(c.k, c.n, c.bits, c.form);
  const MachineRates rates = MeasureMachineRates(flags.smoke ? 4096 : w.bytes());
  std::vector<float> x = RandomTensor(2).NormalF32(c.m * c.k);
  std::vector<float> y(static_cast<size_t>(c.m * c.n));
  ThreadPool pool(flags.threads);
  const Exl3ScratchShape shape = {c.m, c.k};
  Arena arena(Exl3LinearScratchBytes({&shape, 1}, flags.threads));
  Launch launch;
  launch.pool = &pool;
  launch.arena = &arena;
  const Exl3LinearParams params = {&w, MakeView(x.data(), c.m, c.k), MakeView(y.data(), c.m, c.n),
                                   Exl3Rounding::kNone};
  const ThreadPool::Step step(pool);
  const double seconds = MedianSeconds(flags, [&] { Exl3LinearCpu(params, launch); });
  const double weights = static_cast<double>(c.k * c.n);
  const bool decoded = c.form == Exl3Weights::Form::kDecodedF16;
  const double ops = (decoded ? 0.0 : kMul1DecodeOps * weights / rates.simple_lanes_per_s) +
                     static_cast<double>(c.m) * weights / rates.fma_lanes_per_s;
  const double bytes = static_cast<double>(w.bytes()) / rates.read_bytes_per_s;
  const double bound = std::max(ops, bytes) / flags.threads;
  const std::string name =
      "exl3_linear " + (decoded ? std::string("f16 copy") : "K=" + std::to_string(c.bits)) + " " +
      std::to_string(c.k) + "x" + std::to_string(c.n) + " m=" + std::to_string(c.m);
  PrintBenchLine(flags, name, seconds,
                 {{"Gweights/s", weights / seconds * 1e-9},
                  {"GB/s", static_cast<double>(w.bytes()) / seconds * 1e-9},
                  {"GFMA/s", weights * static_cast<double>(c.m) / seconds * 1e-9}},
                 bound / seconds);
}

void RunAll(const BenchFlags& flags) {
  using Form = Exl3Weights::Form;
  if (flags.smoke) {
    RunCase(flags, {128, 128, 3, 1});
    RunCase(flags, {128, 128, 3, 7});
    return;
  }
  const MachineRates rates = MeasureMachineRates(1 << 20);
  std::fprintf(stderr, "one core: %.1f G FMA lanes/s, %.1f G simple lanes/s, %.1f GB/s (1 MiB)\n",
               rates.fma_lanes_per_s * 1e-9, rates.simple_lanes_per_s * 1e-9,
               rates.read_bytes_per_s * 1e-9);
  for (int64_t m : {1, 2, 3, 4, 6, 16, 64, 192})
    RunCase(flags, {2048, 2048, 3, m});
  for (int bits : {1, 2, 4, 5, 6, 8})
    RunCase(flags, {2048, 2048, bits, 1});
  for (int64_t m : {1, 6})
    RunCase(flags, {256, 256, 4, m});
  for (int64_t m : {1, 6, 64})
    RunCase(flags, {2048, 2048, 3, m, Form::kDecodedF16});
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::BenchMain(argc, argv, twinspark::RunAll);
}
