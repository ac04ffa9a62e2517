// RMSNorm, embedding and addition at the demo's and the released model's widths. Bounds as in
// machine_rates.h: the call, then the longest of bytes and operations, most of which are
// conversions; the norm of a single row also waits for its sum, division and root.
#include <cstdint>
#include <string>
#include <vector>

#include "common/check.h"
#include "kernels/norm/add.h"
#include "kernels/norm/embed.h"
#include "kernels/norm/rms_norm.h"
#include "kernels/testing/bench_util.h"
#include "kernels/testing/machine_rates.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {
namespace {

void RunCase(const BenchFlags& flags, int64_t rows, int64_t d) {
  constexpr int64_t kStreams = 4, kVocab = 512;
  RandomTensor random(1);
  const std::vector<Bf16> x = random.NormalBf16(rows * d), table = random.NormalBf16(kVocab * d);
  const std::vector<float> weight = random.NormalF32(d);
  const std::vector<float> a = random.NormalF32(rows * d), b = random.NormalF32(rows * d);
  std::vector<Bf16> out(x.size()), streams(x.size() * kStreams);
  std::vector<int32_t> ids;
  for (int64_t t = 0; t < rows; ++t)
    ids.push_back(static_cast<int32_t>(37 * t % kVocab));
  ThreadPool pool(flags.threads);
  Arena arena(size_t{1} << 12);
  const Launch launch{.pool = &pool, .arena = &arena};
  const double values = static_cast<double>(rows * d);
  const MachineRates rates = MeasureMachineRates(flags.smoke ? 4096 : a.size() * 10);
  const auto report = [&](const char* op, double seconds, const OpWork& work) {
    PrintBenchLine(
        flags, std::string(op) + " m=" + std::to_string(rows) + " d=" + std::to_string(d), seconds,
        {{"GB/s", (work.read + work.written) / seconds * 1e-9},
         {"us/row", seconds / static_cast<double>(rows) * 1e6}},
        BoundSeconds(rates, work, flags.threads) / seconds);
  };
  const ThreadPool::Step step(pool);
  const RmsNormParams norm = {.x = MakeView(x.data(), rows, d),
                              .weight = MakeView(weight.data(), 1, d),
                              .eps = 1e-20f,
                              .out = MakeView(out.data(), rows, d)};
  const OpWork norm_ops = LoadWords() + LoadBf16() + StoreBf16(rates) + OpWork{.fma = 3};
  report("rms_norm", MedianSeconds(flags, [&] { RmsNormCpu(norm, launch); }),
         norm_ops.Times(values) + OpWork{.read = values * 2 + static_cast<double>(d) * 4,
                                         .written = values * 2,
                                         .chain_s = rows == 1 ? rates.norm_chain_s : 0});
  const EmbedParams embed = {.table = MakeView(table.data(), kVocab, d),
                             .ids = ids.data(),
                             .num_copies = static_cast<int>(kStreams),
                             .out = MakeView(streams.data(), rows, kStreams * d)};
  report("embed x 4", MedianSeconds(flags, [&] { EmbedCpu(embed, launch); }),
         {.read = values * 2, .written = values * 2 * kStreams});
  const AddParams add = {.a = MakeView(a.data(), rows, d),
                         .b = MakeView(b.data(), rows, d),
                         .out = MakeView(out.data(), rows, d)};
  report("add f32 + f32 -> bf16", MedianSeconds(flags, [&] { AddCpu(add, launch); }),
         (StoreBf16(rates) + OpWork{.simple = 1}).Times(values) +
             OpWork{.read = values * 8, .written = values * 2});
}

void RunAll(const BenchFlags& flags) {
  if (flags.smoke) {
    RunCase(flags, 3, 72);
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
