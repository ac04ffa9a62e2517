// The table of a step and the rotation of queries and latents (512 channels a head, 64 of them
// rotated, in place as the model does it). Bounds as in machine_rates.h; for the table the C
// library's functions alone, whose bits are the contract.
#include "kernels/rope/rope.h"

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
  int64_t rows;
  int num_heads, head_dim, rope_dim;
};

void RunCase(const BenchFlags& flags, const Case& c) {
  RandomTensor random(1);
  const int64_t cols = int64_t{c.num_heads} * c.head_dim;
  std::vector<Bf16> x = random.NormalBf16(c.rows * cols);
  std::vector<float> table(static_cast<size_t>(c.rows * c.rope_dim));
  std::vector<int64_t> positions;
  for (int64_t t = 0; t < c.rows; ++t)
    positions.push_back(5000 + t);
  const std::vector<float> frequencies = PlainRopeFrequencies(c.rope_dim, 10000.0f);
  ThreadPool pool(flags.threads);
  Arena arena(size_t{1} << 12);
  const Launch launch{.pool = &pool, .arena = &arena};
  const MachineRates rates = MeasureMachineRates(flags.smoke ? 4096 : x.size() * sizeof(Bf16));
  const ThreadPool::Step step(pool);
  const RopeTableParams table_params = {.positions = positions.data(),
                                        .frequencies = frequencies.data(),
                                        .out = MakeView(table.data(), c.rows, c.rope_dim)};
  const double table_seconds = MedianSeconds(flags, [&] { RopeTableCpu(table_params, launch); });
  const double angles = static_cast<double>(c.rows * c.rope_dim);
  volatile float sink = 0;
  const auto all = [&](auto function) {  // one after the other: both at once is another function
    for (int64_t t = 0; t < c.rows; ++t) {
      for (const float f : frequencies)
        sink = function(static_cast<float>(positions[static_cast<size_t>(t)]) * f);
    }
  };
  const double functions = MedianSeconds(flags, [&] {
    all([](float angle) { return std::cos(angle); });
    all([](float angle) { return std::sin(angle); });
  });
  PrintBenchLine(flags, "rope_table m=" + std::to_string(c.rows), table_seconds,
                 {{"ns/value", table_seconds / angles * 1e9}},
                 functions / flags.threads / table_seconds);
  const TensorView view = MakeView(x.data(), c.rows, cols);
  const double seconds = MedianSeconds(flags, [&] {
    RopeCpu({.x = view,
             .head_dim = c.head_dim,
             .rope_dim = c.rope_dim,
             .table = MakeView(static_cast<const float*>(table.data()), c.rows, c.rope_dim),
             .out = view},
            launch);
  });
  const double values = angles * c.num_heads;
  const OpWork ops = LoadWords() + StoreWords() + OpWork{.fma = 2, .simple = 1};
  const OpWork work =
      ops.Times(values) + OpWork{.read = values * 2 + angles * 4, .written = values * 2};
  PrintBenchLine(
      flags, "rope m=" + std::to_string(c.rows) + " heads=" + std::to_string(c.num_heads), seconds,
      {{"GB/s", (work.read + work.written) / seconds * 1e-9},
       {"us/row", seconds / static_cast<double>(c.rows) * 1e6}},
      BoundSeconds(rates, work, flags.threads) / seconds);
}

void RunAll(const BenchFlags& flags) {
  if (flags.smoke) {
    RunCase(flags, {3, 2, 32, 16});
    return;
  }
  for (const int num_heads : {1, 4, 32}) {
    for (const int64_t rows : {1, 6, 64})
      RunCase(flags, {rows, num_heads, 512, 64});
  }
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::BenchMain(argc, argv, twinspark::RunAll);
}
