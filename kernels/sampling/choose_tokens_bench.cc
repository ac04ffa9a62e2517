// Sampling at the demo's and the released model's vocabularies: greedy, recommended settings, no
// filters. Bounds as in machine_rates.h, for what is done with every id: reading, in draws the
// Philox rounds of all (nearly all may win at the start), with top_p the sum of probabilities.
#include "kernels/sampling/choose_tokens.h"

#include <string>
#include <vector>

#include "kernels/testing/bench_util.h"
#include "kernels/testing/machine_rates.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {
namespace {

// Per id and vector operation: all logits are read, the largest found and each looked at for
// infinities; divided where the temperature is not 1.
OpWork ScanWork() {
  return {.fma = 1, .simple = 1};
}
// Philox of a candidate that may win, on numbers of 64 bits (two lanes): what depends on the id in
// ten rounds (15 products, 15 shifts, 29 others), before it two to see that it may, after it six to
// rule it out.
OpWork DrawWork() {
  return OpWork{.fma = 15, .simple = 29, .shift = 15}.Times(2) + OpWork{.simple = 8};
}
// Sum of probabilities: f32 to f64 (two lanes), exponential.
OpWork SumWork() {
  return OpWork{.fma = 12, .simple = 5, .shift = 2}.Times(2);
}

void RunCase(const BenchFlags& flags,
             const char* name,
             int64_t vocab,
             const ChoiceRow& row,
             const OpWork& per_id) {
  constexpr int64_t kRows = 4;
  const std::vector<float> logits = RandomTensor(1).NormalF32(kRows * vocab, 4.0f);
  std::vector<ChoiceRow> rows(kRows, row);
  std::vector<int32_t> tokens(kRows);
  ThreadPool pool(flags.threads);
  Arena arena(static_cast<size_t>(ChooseTokensScratchBytesCpu(vocab, flags.threads)));
  const ChooseTokensParams params = {.logits = MakeView(logits.data(), kRows, vocab),
                                     .rows = rows.data(),
                                     .tokens = tokens.data()};
  const ThreadPool::Step step(pool);
  const double seconds =
      MedianSeconds(flags, [&] { ChooseTokensCpu(params, {.pool = &pool, .arena = &arena}); });
  const double bytes = static_cast<double>(logits.size()) * sizeof(float);
  const MachineRates rates =
      MeasureMachineRates(flags.smoke ? 4096 : logits.size() * sizeof(float));
  const OpWork work = per_id.Times(static_cast<double>(logits.size())) + OpWork{.read = bytes};
  PrintBenchLine(flags, std::string("choose ") + name + " vocab=" + std::to_string(vocab), seconds,
                 {{"GB/s", bytes / seconds * 1e-9}, {"us/row", seconds / kRows * 1e6}},
                 BoundSeconds(rates, work, flags.threads) / seconds);
}

void RunAll(const BenchFlags& flags) {
  for (const int64_t vocab : {int64_t{4096}, flags.smoke ? int64_t{1000} : int64_t{129280}}) {
    RunCase(flags, "greedy", vocab, {}, ScanWork());
    RunCase(flags, "T=1 top_p=.95", vocab, {.temperature = 1, .top_p = 0.95f},
            ScanWork() + SumWork());
    RunCase(flags, "T=1", vocab, {.temperature = 1}, ScanWork() + DrawWork());
    RunCase(flags, "T=.7", vocab, {.temperature = 0.7f},
            ScanWork() + OpWork{.divide = 1} + DrawWork());
    RunCase(flags, "T=1 top_k=40", vocab, {.temperature = 1, .top_k = 40},
            ScanWork() + OpWork{.simple = 1});
  }
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::BenchMain(argc, argv, twinspark::RunAll);
}
