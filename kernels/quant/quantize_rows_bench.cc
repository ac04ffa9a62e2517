// Packing and unpacking of cache rows. Bounds as in machine_rates.h.
#include "kernels/quant/quantize_rows.h"

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
  const auto report = [&](const char* op, double seconds, const OpWork& work) {
    const std::string shape = std::string(op) + " " + CacheFormatName(format) + " " +
                              std::to_string(rows) + "x" + std::to_string(cols);
    PrintBenchLine(flags, shape, seconds, {{"Gvalues/s", values / seconds * 1e-9}},
                   BoundSeconds(rates, work, flags.threads) / seconds);
  };
  const ThreadPool::Step step(pool);
  const ConstTensorView in = MakeView(static_cast<const Bf16*>(x.data()), rows, cols);
  const double packed_bytes = static_cast<double>(packed.size());
  // Read twice; maximum; scaled, clamped, rounded as a normal and as a subnormal number, signed,
  // narrowed.
  const bool divided = format == CacheFormat::kQ4E4;
  const OpWork store =
      LoadBf16() + LoadBf16() +
      OpWork{.fma = divided ? 0.0 : 1.0, .simple = 15, .shift = 4, .divide = divided ? 1.0 : 0.0};
  report("store", MedianSeconds(flags, [&] { StoreRowsCpu({.x = in, .dst = cache}, launch); }),
         store.Times(values) + OpWork{.read = values * 2, .written = packed_bytes});
  // Four bits: spread, shifted, looked up; with 8 lanes the sign apart. Eight bits: widened, moved,
  // converted, scaled.
  const OpWork load = format == CacheFormat::kQ8
                          ? OpWork{.fma = 1, .simple = 0.5, .shift = 2}
                          : OpWork{.simple = rates.lanes >= 16 ? 0.0 : 2.0, .shift = 3};
  const TensorView out = MakeView(back.data(), rows, cols);
  report("load", MedianSeconds(flags, [&] { LoadRowsCpu({.src = cache, .out = out}, launch); }),
         load.Times(values) + OpWork{.read = packed_bytes, .written = values * 4});
  report("simulate",
         MedianSeconds(flags,
                       [&] { QuantizeValuesCpu({.x = in, .format = format, .out = out}, launch); }),
         (store + load).Times(values) + OpWork{.read = values * 2, .written = values * 4});
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
