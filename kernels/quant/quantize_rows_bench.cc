// Packing and unpacking of cache rows. The bound is the larger of the bytes of both sides at
// streaming speed and the vector operations: some 30 to pack a vector (its part of the group's
// maximum and scale included; a division counts 8), kDecodeCacheOps to unpack it.
#include "kernels/quant/quantize_rows.h"

#include <algorithm>
#include <string>
#include <vector>

#include "kernels/testing/bench_util.h"
#include "kernels/testing/machine_rates.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {
namespace {

void RunCase(const BenchFlags& flags, CacheFormat format, int64_t rows, int64_t cols) {
  RandomTensor random(1);
  std::vector<Bf16> x = random.NormalBf16(rows * cols);
  std::vector<float> back(x.size());
  std::vector<uint8_t> packed(static_cast<size_t>(CacheRowBytes(format, cols) * rows));
  ThreadPool pool(flags.threads);
  Arena arena(size_t{1} << 16);
  const Launch launch{.pool = &pool, .arena = &arena};
  const CacheRows cache{packed.data(), format, rows, cols};
  const double values = static_cast<double>(rows * cols);
  const MachineRates rates = MeasureMachineRates(flags.smoke ? 4096 : back.size() * sizeof(float));
  const auto report = [&](const char* op, double seconds, double bytes_per_value, double ops) {
    const std::string shape = std::string(op) + " " + CacheFormatName(format) + " " +
                              std::to_string(rows) + "x" + std::to_string(cols);
    PrintBenchLine(
        flags, shape, seconds, {{"Gvalues/s", values / seconds * 1e-9}},
        values *
            std::max(bytes_per_value / rates.read_bytes_per_s, ops / rates.simple_lanes_per_s) /
            flags.threads / seconds);
  };
  const ThreadPool::Step step(pool);
  const ConstTensorView in = MakeView(static_cast<const Bf16*>(x.data()), rows, cols);
  report("store", MedianSeconds(flags, [&] { StoreRowsCpu({.x = in, .dst = cache}, launch); }), 3,
         format == CacheFormat::kQ4E4 ? 38 : 30);
  const TensorView out = MakeView(back.data(), rows, cols);
  report("load", MedianSeconds(flags, [&] { LoadRowsCpu({.src = cache, .out = out}, launch); }), 5,
         kDecodeCacheOps);
}

void RunAll(const BenchFlags& flags) {
  const int64_t rows = flags.smoke ? 3 : 64;
  RunCase(flags, CacheFormat::kQ8, rows, 512);
  RunCase(flags, CacheFormat::kQ4E4, rows, 512);
  RunCase(flags, CacheFormat::kQ4E8, rows, 128);
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::BenchMain(argc, argv, twinspark::RunAll);
}
