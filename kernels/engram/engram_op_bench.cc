// Dequantisation of looked-up rows and the gate, at the demo's and the released model's shapes.
// Bounds as in machine_rates.h; codes are looked at for NaN, widened, moved, converted, scaled and
// narrowed.
#include <cstdint>
#include <string>
#include <vector>

#include "common/check.h"
#include "kernels/engram/engram.h"
#include "kernels/testing/bench_util.h"
#include "kernels/testing/machine_rates.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {
namespace {

struct Case {
  int64_t rows, columns, d;  // columns: of a token's looked-up rows together
};

void RunCase(const BenchFlags& flags, const Case& c) {
  constexpr int64_t kStreams = 4, kGroup = 32;
  RandomTensor random(1);
  std::vector<uint8_t> codes, scales;
  for (int64_t i = 0; i < c.rows * c.columns; ++i)
    codes.push_back(static_cast<uint8_t>(i * 37 % 126));
  for (int64_t i = 0; i < c.rows * c.columns / kGroup; ++i)
    scales.push_back(static_cast<uint8_t>(120 + i % 8));
  std::vector<Bf16> e(codes.size());
  std::vector<Bf16> streams = random.NormalBf16(c.rows * kStreams * c.d);
  const std::vector<Bf16> kv = random.NormalBf16(c.rows * (kStreams + 1) * c.d);
  const std::vector<float> weight = random.NormalF32(kStreams * c.d);
  ThreadPool pool(flags.threads);
  Arena arena(size_t{1} << 12);
  const Launch launch{.pool = &pool, .arena = &arena};
  const MachineRates rates = MeasureMachineRates(flags.smoke ? 4096 : kv.size() * 4);
  const auto report = [&](const std::string& op, double seconds, const OpWork& work) {
    PrintBenchLine(flags, op + " m=" + std::to_string(c.rows), seconds,
                   {{"GB/s", (work.read + work.written) / seconds * 1e-9},
                    {"us/row", seconds / static_cast<double>(c.rows) * 1e6}},
                   BoundSeconds(rates, work, flags.threads) / seconds);
  };
  const ThreadPool::Step step(pool);
  const EngramDequantizeParams dequantize = {
      .codes = ConstTensorView(
          BasicTensorView<const void*>{codes.data(), DType::kF8E4M3, c.rows, c.columns, c.columns}),
      .scales = ConstTensorView(BasicTensorView<const void*>{
          scales.data(), DType::kF8E8M0, c.rows, c.columns / kGroup, c.columns / kGroup}),
      .out = MakeView(e.data(), c.rows, c.columns)};
  report("engram_dequantize n=" + std::to_string(c.columns),
         MedianSeconds(flags, [&] { EngramDequantizeCpu(dequantize, launch); }),
         OpWork{.fma = 1, .simple = 0.7, .shift = rates.lanes >= 16 ? 2.5 : 4.0}.Times(
             static_cast<double>(codes.size())) +
             OpWork{.read = static_cast<double>(codes.size() + scales.size()),
                    .written = static_cast<double>(codes.size()) * 2});
  const TensorView s = MakeView(streams.data(), c.rows, kStreams * c.d);
  const EngramGateParams gate = {.streams = s,
                                 .kv = MakeView(kv.data(), c.rows, (kStreams + 1) * c.d),
                                 .weight = MakeView(weight.data(), kStreams, c.d),
                                 .eps = 1e-20f,
                                 .out = s};
  report("engram_gate d=" + std::to_string(c.d),
         MedianSeconds(flags, [&] { EngramGateCpu(gate, launch); }),
         (LoadBf16().Times(2) + LoadWords().Times(2) + StoreWords() + OpWork{.fma = 5})
                 .Times(static_cast<double>(streams.size())) +
             OpWork{.read = static_cast<double>(streams.size() + kv.size()) * 2 +
                            static_cast<double>(weight.size()) * 4,
                    .written = static_cast<double>(streams.size()) * 2,
                    .chain_s = c.rows == 1 ? rates.norm_chain_s : 0});
}

void RunAll(const BenchFlags& flags) {
  if (flags.smoke) {
    RunCase(flags, {3, 64, 72});
    return;
  }
  for (const int64_t rows : {1, 6, 64})
    RunCase(flags, {rows, 3 * 4 * 32, 256});
  for (const int64_t rows : {1, 6, 64})
    RunCase(flags, {rows, 3 * 8 * 256, 5120});
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::BenchMain(argc, argv, twinspark::RunAll);
}
