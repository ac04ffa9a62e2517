// Sampling at the demo's and the released model's vocabularies: greedy, recommended settings, no
// filters. The bound is one streaming read of the logits.
#include "kernels/sampling/choose_tokens.h"

#include <string>
#include <vector>

#include "kernels/testing/bench_util.h"
#include "kernels/testing/machine_rates.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {
namespace {

void RunCase(const BenchFlags& flags, const char* name, int64_t vocab, const ChoiceRow& row) {
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
  PrintBenchLine(flags, std::string("choose ") + name + " vocab=" + std::to_string(vocab), seconds,
                 {{"GB/s", bytes / seconds * 1e-9}, {"us/row", seconds / kRows * 1e6}},
                 bytes / rates.read_bytes_per_s / flags.threads / seconds);
}

void RunAll(const BenchFlags& flags) {
  for (const int64_t vocab : {int64_t{4096}, flags.smoke ? int64_t{1000} : int64_t{129280}}) {
    RunCase(flags, "greedy", vocab, {});
    RunCase(flags, "T=1 top_p=.95", vocab, {.temperature = 1, .top_p = 0.95f});
    RunCase(flags, "T=1", vocab, {.temperature = 1});
    RunCase(flags, "T=1 top_k=40", vocab, {.temperature = 1, .top_k = 40});
  }
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::BenchMain(argc, argv, twinspark::RunAll);
}
