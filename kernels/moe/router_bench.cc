// The router at the demo's and the released model's shapes, f32 gate. Bounds as in machine_rates.h:
// the gate streamed once or the multiply-adds, then the scores of the chosen.
#include "kernels/moe/router.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "common/check.h"
#include "kernels/testing/bench_util.h"
#include "kernels/testing/machine_rates.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {
namespace {

struct Case {
  int64_t rows, d, num_experts;
  int num_chosen;
};

void RunCase(const BenchFlags& flags, const Case& c) {
  RandomTensor random(1);
  const std::vector<Bf16> x = random.NormalBf16(c.rows * c.d);
  const std::vector<float> gate = random.NormalF32(c.num_experts * c.d, 0.02f);
  const std::vector<float> bias = random.NormalF32(c.num_experts, 0.1f);
  std::vector<int32_t> ids(static_cast<size_t>(c.rows * c.num_chosen));
  std::vector<float> weights(ids.size());
  ThreadPool pool(flags.threads);
  Arena arena(static_cast<size_t>(
      RouterScratchBytesCpu(c.rows, c.d, static_cast<int>(c.num_experts), flags.threads)));
  const Launch launch{.pool = &pool, .arena = &arena};
  const double gate_bytes = static_cast<double>(gate.size() * sizeof(float));
  const MachineRates rates = MeasureMachineRates(flags.smoke ? 4096 : gate.size() * sizeof(float));
  const RouterParams params = {.x = MakeView(x.data(), c.rows, c.d),
                               .gate = MakeView(gate.data(), c.num_experts, c.d),
                               .bias = bias.data(),
                               .num_chosen = c.num_chosen,
                               .scaling_factor = 1.5f,
                               .ids = MakeView(ids.data(), c.rows, c.num_chosen),
                               .weights = MakeView(weights.data(), c.rows, c.num_chosen)};
  const ThreadPool::Step step(pool);
  const double seconds = MedianSeconds(flags, [&] { RouterCpu(params, launch); });
  const double fma = static_cast<double>(c.rows * c.d * c.num_experts);
  // The scores of the chosen, whose bits are those of the C library.
  volatile float stored = 0.3f;
  volatile float sink = 0;
  const auto dot = [&] { return static_cast<float>(stored); };
  const double scores = MedianSeconds(flags, [&] {
    for (int64_t i = 0; i < c.rows * c.num_chosen; ++i)
      sink = std::sqrt(std::max(dot(), 0.0f) + std::log1p(std::exp(-std::abs(dot()))));
  });
  const double bound =
      BoundSeconds(rates,
                   {.fma = fma, .shift = 2.0 * static_cast<double>(x.size()), .read = gate_bytes},
                   flags.threads) +
      scores / flags.threads;
  PrintBenchLine(flags,
                 "router m=" + std::to_string(c.rows) + " d=" + std::to_string(c.d) +
                     " experts=" + std::to_string(c.num_experts),
                 seconds,
                 {{"GB/s", gate_bytes / seconds * 1e-9},
                  {"GFMA/s", fma / seconds * 1e-9},
                  {"us/row", seconds / static_cast<double>(c.rows) * 1e6}},
                 bound / seconds);
}

void RunAll(const BenchFlags& flags) {
  if (flags.smoke) {
    RunCase(flags, {3, 72, 8, 2});
    return;
  }
  for (const int64_t rows : {1, 6, 64})
    RunCase(flags, {rows, 256, 8, 2});
  for (const int64_t rows : {1, 6, 64})
    RunCase(flags, {rows, 5120, 384, 6});
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::BenchMain(argc, argv, twinspark::RunAll);
}
