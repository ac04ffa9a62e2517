// The activation and whole expert layers (EXL3, K = 3) at the demo's and the released model's
// shapes (there one rank of two, 24 of its 384 experts). Bounds: for the activation the larger of
// its bytes at streaming speed and its vector operations; for a layer the larger of its matrices'
// bytes and their vector operations (decoding every matrix that has a row once, one multiply-add
// per row and weight).
#include "kernels/moe/moe.h"

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "common/check.h"
#include "kernels/moe/swiglu.h"
#include "kernels/testing/bench_util.h"
#include "kernels/testing/machine_rates.h"
#include "kernels/testing/random_exl3.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {
namespace {

// Operations per value of the activation: the exponential and the division, sign, sum, clamps and
// the product.
OpWork SwiGluWork() {
  return LoadWords().Times(2) + StoreWords() + ExpOps() +
         OpWork{.fma = 1, .simple = 5, .divide = 1};
}

void RunSwiGlu(const BenchFlags& flags, int64_t rows, int64_t n) {
  RandomTensor random(1);
  const std::vector<Bf16> gate = random.NormalBf16(rows * n), up = random.NormalBf16(rows * n);
  std::vector<Bf16> out(gate.size());
  ThreadPool pool(flags.threads);
  Arena arena(size_t{1} << 12);
  const Launch launch{.pool = &pool, .arena = &arena};
  const double bytes = static_cast<double>(gate.size()) * 6;
  const MachineRates rates = MeasureMachineRates(flags.smoke ? 4096 : gate.size() * 6);
  const SwiGluParams params = {.gate = MakeView(gate.data(), rows, n),
                               .up = MakeView(up.data(), rows, n),
                               .limit = 10.0f,
                               .out = MakeView(out.data(), rows, n)};
  const ThreadPool::Step step(pool);
  const double seconds = MedianSeconds(flags, [&] { SwiGluCpu(params, launch); });
  PrintBenchLine(
      flags, "swiglu m=" + std::to_string(rows) + " n=" + std::to_string(n), seconds,
      {{"GB/s", bytes / seconds * 1e-9}, {"us/row", seconds / static_cast<double>(rows) * 1e6}},
      BoundSeconds(rates,
                   SwiGluWork().Times(static_cast<double>(rows * n)) +
                       OpWork{.read = bytes * 2 / 3, .written = bytes / 3},
                   flags.threads) /
          seconds);
}

struct Case {
  int64_t rows, d, inner;
  int num_experts, num_chosen;
};

// Matrices of one shape share their content, not their memory.
std::vector<LinearWeights> Matrices(int count, int64_t in, int64_t out) {
  std::vector<LinearWeights> weights;
  for (int i = 0; i < count; ++i)
    weights.emplace_back(RandomExl3(in, out, 3, Exl3Weights::Form::kTrellis));
  return weights;
}

void RunMoe(const BenchFlags& flags, const Case& c) {
  RandomTensor random(2);
  const int num_all = c.num_experts + 1;  // and the shared one
  const std::vector<LinearWeights> wide = Matrices(2 * num_all, c.d, c.inner);
  const std::vector<LinearWeights> down = Matrices(num_all, c.inner, c.d);
  std::vector<ExpertWeights> experts;
  for (size_t e = 0; e < static_cast<size_t>(num_all); ++e)
    experts.push_back({.gate = &wide[2 * e], .up = &wide[2 * e + 1], .down = {&down[e]}});
  const std::vector<Bf16> x = random.NormalBf16(c.rows * c.d);
  std::vector<float> out(x.size()), weights(static_cast<size_t>(c.rows * c.num_chosen), 0.4f);
  std::vector<int32_t> ids;
  std::vector<bool> used(static_cast<size_t>(num_all));
  used.back() = true;
  for (int64_t t = 0; t < c.rows; ++t) {
    const int64_t first = random.Below(c.num_experts);
    for (int64_t k = 0; k < c.num_chosen; ++k) {
      ids.push_back(static_cast<int32_t>((first + k) % c.num_experts));
      used[static_cast<size_t>(ids.back())] = true;
    }
  }
  const size_t linear_bytes =
      LinearScratchBytes(wide[0], c.rows, flags.threads) * static_cast<size_t>(2 * num_all);
  ThreadPool pool(flags.threads);
  Arena arena(linear_bytes + static_cast<size_t>(MoeScratchBytesCpu(c.rows, c.num_chosen, c.d,
                                                                    c.inner, c.num_experts)));
  const Launch launch{.pool = &pool, .arena = &arena};
  const MoeParams params = {
      .x = MakeView(x.data(), c.rows, c.d),
      .ids = MakeView(static_cast<const int32_t*>(ids.data()), c.rows, c.num_chosen),
      .weights = MakeView(static_cast<const float*>(weights.data()), c.rows, c.num_chosen),
      .experts = experts.data(),
      .num_experts = c.num_experts,
      .shared = &experts.back(),
      .inner = c.inner,
      .limit = 10.0f,
      .out = {MakeView(out.data(), c.rows, c.d)}};
  const ThreadPool::Step step(pool);
  const double seconds = MedianSeconds(flags, [&] { MoeCpu(params, launch); });
  const double num_used = static_cast<double>(std::count(used.begin(), used.end(), true));
  const double each = 3.0 * static_cast<double>(c.d * c.inner);  // weights of one expert
  const double bytes = num_used * static_cast<double>(2 * wide[0].bytes() + down[0].bytes());
  const double fma = each * static_cast<double>(c.rows * (c.num_chosen + 1));
  const MachineRates rates = MeasureMachineRates(flags.smoke ? 4096 : static_cast<size_t>(bytes));
  const double ops =
      kMul1DecodeOps * num_used * each / rates.simple_lanes_per_s + fma / rates.fma_lanes_per_s;
  PrintBenchLine(flags,
                 "moe m=" + std::to_string(c.rows) + " d=" + std::to_string(c.d) +
                     " inner=" + std::to_string(c.inner) + " " + std::to_string(c.num_chosen) +
                     "+1 of " + std::to_string(c.num_experts),
                 seconds,
                 {{"GB/s", bytes / seconds * 1e-9},
                  {"GFMA/s", fma / seconds * 1e-9},
                  {"us/row", seconds / static_cast<double>(c.rows) * 1e6}},
                 std::max(ops, bytes / rates.read_bytes_per_s) / flags.threads / seconds);
}

void RunAll(const BenchFlags& flags) {
  if (flags.smoke) {
    RunSwiGlu(flags, 3, 72);
    RunMoe(flags, {3, 128, 128, 4, 2});
    return;
  }
  for (const int64_t n : {256, 1152}) {
    for (const int64_t rows : {1, 6, 64})
      RunSwiGlu(flags, rows, n);
  }
  for (const int64_t rows : {1, 6, 64})
    RunMoe(flags, {rows, 256, 256, 8, 2});
  for (const int64_t rows : {1, 6, 64})
    RunMoe(flags, {rows, 5120, 1152, 24, 6});
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::BenchMain(argc, argv, twinspark::RunAll);
}
