// Index scores and selection: rows at a given context length, every mode's work included. The bound
// is the multiply-adds of the scores and the vector operations that decode every key once.
#include "kernels/indexer/index_select.h"

#include <string>
#include <vector>

#include "kernels/quant/quantize_rows.h"
#include "kernels/testing/bench_util.h"
#include "kernels/testing/machine_rates.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {
namespace {

struct Case {
  int64_t rows;
  int num_heads;
  int64_t visible;
  int top_k, candidate_top;
};

void RunCase(const BenchFlags& flags, const Case& c) {
  constexpr int kDim = 128, kRowsPerPage = 64, kBlock = 8;
  RandomTensor random(1);
  const int64_t num_pages = c.visible / kRowsPerPage + 1;
  const int64_t num_keys = num_pages * kRowsPerPage;
  std::vector<uint8_t> keys(
      static_cast<size_t>(num_keys * CacheRowBytes(CacheFormat::kQ4E8, kDim)));
  const std::vector<float> key_values = random.NormalF32(num_keys * kDim);
  StoreRowsCpu({.x = MakeView(key_values.data(), num_keys, kDim),
                .dst = {keys.data(), CacheFormat::kQ4E8, num_keys, kDim}},
               {});
  std::vector<int32_t> pages;
  for (int64_t p = 0; p < num_pages; ++p)
    pages.push_back(static_cast<int32_t>(num_pages - 1 - p));
  std::vector<IndexRow> rows(static_cast<size_t>(c.rows), {pages.data(), c.visible});
  std::vector<Bf16> q = random.NormalBf16(c.rows * c.num_heads * kDim);
  std::vector<float> weights = random.NormalF32(c.rows * c.num_heads);
  std::vector<int32_t> selected(static_cast<size_t>(c.rows * c.top_k)), num_selected(rows.size());
  std::vector<int32_t> candidates(static_cast<size_t>(c.rows * c.candidate_top)),
      num_candidates(rows.size());
  ThreadPool pool(flags.threads);
  Arena arena(static_cast<size_t>(
      IndexSelectScratchBytesCpu(c.top_k, c.candidate_top, c.num_heads, kDim, flags.threads)));
  const IndexSelectParams params = {
      .q = MakeView(static_cast<const Bf16*>(q.data()), c.rows, c.num_heads * kDim),
      .weights = MakeView(static_cast<const float*>(weights.data()), c.rows, c.num_heads),
      .rows = rows.data(),
      .num_heads = c.num_heads,
      .dim = kDim,
      .keys = {keys.data(), CacheFormat::kQ4E8, num_pages * kRowsPerPage, kDim},
      .rows_per_page = kRowsPerPage,
      .mode = IndexSelectParams::Mode::kProduce,
      .top_k = c.top_k,
      .candidate_block = kBlock,
      .candidate_top = c.candidate_top,
      .selected = MakeView(selected.data(), c.rows, c.top_k),
      .num_selected = num_selected.data(),
      .candidates = MakeView(candidates.data(), c.rows, c.candidate_top),
      .num_candidates = num_candidates.data()};
  const ThreadPool::Step step(pool);
  const double seconds =
      MedianSeconds(flags, [&] { IndexSelectCpu(params, {.pool = &pool, .arena = &arena}); });
  const double fma = static_cast<double>(c.rows * c.visible * c.num_heads * kDim);
  const MachineRates rates = MeasureMachineRates(4096);
  const double bound = fma / rates.fma_lanes_per_s + kDecodeCacheOps *
                                                         static_cast<double>(c.visible * kDim) /
                                                         rates.simple_lanes_per_s;
  PrintBenchLine(
      flags,
      "index_select m=" + std::to_string(c.rows) + " heads=" + std::to_string(c.num_heads) +
          " groups=" + std::to_string(c.visible),
      seconds,
      {{"GFMA/s", fma / seconds * 1e-9}, {"us/row", seconds / static_cast<double>(c.rows) * 1e6}},
      bound / flags.threads / seconds);
}

void RunAll(const BenchFlags& flags) {
  if (flags.smoke) {
    RunCase(flags, {3, 2, 200, 16, 4});
    return;
  }
  for (const int64_t rows : {1, 64})
    RunCase(flags, {rows, 4, 600, 64, 16});
  for (const int64_t rows : {1, 6, 64})
    RunCase(flags, {rows, 32, 32768, 512, 2048});
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::BenchMain(argc, argv, twinspark::RunAll);
}
