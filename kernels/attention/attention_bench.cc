// Attention at the demo's and the released model's shapes: one row (decode), 6 rows (verify) and a
// prefill chunk. The bound is the multiply-adds (2 * keys * head_dim per row and head) and the
// vector operations that decode every key once, which is what a call cannot do without.
#include "kernels/attention/attention.h"

#include <cmath>
#include <set>
#include <string>
#include <vector>

#include "kernels/attention/compress_pool.h"
#include "kernels/quant/quantize_rows.h"
#include "kernels/testing/bench_util.h"
#include "kernels/testing/machine_rates.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {
namespace {

struct Case {
  int64_t rows;
  int num_heads, head_dim;
  int64_t window, selected, first_position;
};

void RunCase(const BenchFlags& flags, const Case& c) {
  RandomTensor random(1);
  const int64_t ring_slots = c.window + 8;
  const int64_t num_groups = c.first_position + c.rows;
  constexpr int kRowsPerPage = 64;
  const int64_t num_pages = num_groups / kRowsPerPage + 1;
  ThreadPool pool(flags.threads);
  Arena arena(static_cast<size_t>(
      AttentionScratchBytesCpu(c.window + c.selected, c.num_heads, c.head_dim, flags.threads)));
  const Launch launch{.pool = &pool, .arena = &arena};
  const auto random_rows = [&](CacheFormat format, int64_t rows) {
    std::vector<uint8_t> bytes(static_cast<size_t>(CacheRowBytes(format, c.head_dim) * rows));
    const std::vector<float> x = random.NormalF32(rows * c.head_dim);
    StoreRowsCpu({.x = MakeView(x.data(), rows, c.head_dim),
                  .dst = {bytes.data(), format, rows, c.head_dim}},
                 launch);
    return bytes;
  };
  std::vector<uint8_t> ring = random_rows(CacheFormat::kQ8, ring_slots);
  std::vector<uint8_t> step = random_rows(CacheFormat::kQ8, c.rows);
  std::vector<uint8_t> pages = random_rows(CacheFormat::kQ4E4, num_pages * kRowsPerPage);
  const int64_t cols = int64_t{c.num_heads} * c.head_dim;
  std::vector<Bf16> q = random.NormalBf16(c.rows * cols);
  std::vector<Bf16> out(q.size());
  std::vector<float> sink(static_cast<size_t>(c.num_heads), 0.5f);
  std::vector<int32_t> table, selected, num_selected;
  for (int64_t p = 0; p < num_pages; ++p)
    table.push_back(static_cast<int32_t>(num_pages - 1 - p));
  std::vector<AttentionRow> rows;
  std::set<int32_t> groups;
  double keys = 0;
  for (int64_t t = 0; t < c.rows; ++t) {
    const int64_t p = c.first_position + t;
    AttentionRow row;
    row.ring_begin = std::min(std::max<int64_t>(0, p - c.window + 1), c.first_position);
    row.ring_end = c.first_position;
    row.step_begin = std::max<int64_t>(0, t - c.window + 1);
    row.step_end = t + 1;
    row.pages = table.data();
    rows.push_back(row);
    const int64_t visible = p + 1;
    const int64_t count = std::min(c.selected, visible);
    for (int64_t i = 0; i < c.selected; ++i) {
      selected.push_back(static_cast<int32_t>(i * visible / std::max<int64_t>(count, 1)));
      if (i < count) groups.insert(selected.back());
    }
    num_selected.push_back(static_cast<int32_t>(count));
    keys +=
        static_cast<double>(row.ring_end - row.ring_begin + row.step_end - row.step_begin + count);
  }
  const AttentionParams params = {
      .q = MakeView(static_cast<const Bf16*>(q.data()), c.rows, cols),
      .rows = rows.data(),
      .sink = sink.data(),
      .num_heads = c.num_heads,
      .head_dim = c.head_dim,
      .scale = 1.0f / std::sqrt(static_cast<float>(c.head_dim)),
      .round_probabilities = true,
      .ring = {ring.data(), CacheFormat::kQ8, ring_slots, c.head_dim},
      .ring_slots = ring_slots,
      .step_rows = {step.data(), CacheFormat::kQ8, c.rows, c.head_dim},
      .compressed = {pages.data(), CacheFormat::kQ4E4, num_pages * kRowsPerPage, c.head_dim},
      .rows_per_page = kRowsPerPage,
      .selected = MakeView(static_cast<const int32_t*>(selected.data()), c.rows, c.selected),
      .num_selected = num_selected.data(),
      .out = MakeView(out.data(), c.rows, cols)};
  const ThreadPool::Step step_guard(pool);
  const double seconds = MedianSeconds(flags, [&] { AttentionCpu(params, launch); });
  const double fma = 2 * keys * static_cast<double>(cols);
  const int64_t window = rows.front().ring_end - rows.front().ring_begin + c.rows;
  const double decoded = static_cast<double>(window + static_cast<int64_t>(groups.size())) *
                         static_cast<double>(c.head_dim);
  const MachineRates rates = MeasureMachineRates(4096);
  const double bound =
      fma / rates.fma_lanes_per_s + kDecodeCacheOps * decoded / rates.simple_lanes_per_s;
  PrintBenchLine(
      flags,
      "attention m=" + std::to_string(c.rows) + " heads=" + std::to_string(c.num_heads) +
          " dim=" + std::to_string(c.head_dim) + " keys=" + std::to_string(c.window) + "+" +
          std::to_string(c.selected),
      seconds,
      {{"GFMA/s", fma / seconds * 1e-9}, {"us/row", seconds / static_cast<double>(c.rows) * 1e6}},
      bound / flags.threads / seconds);
}

// The pooling of one layer's groups: per channel a softmax over two tokens.
void RunPool(const BenchFlags& flags, int64_t groups) {
  constexpr int kRatio = 2;
  constexpr int64_t kCols = 512;
  RandomTensor random(2);
  const std::vector<float> kv_score = random.NormalF32(groups * kRatio * 2 * kCols);
  std::vector<float> carry = random.NormalF32(2 * kCols);
  std::vector<int64_t> sources;
  for (int64_t i = 0; i < groups * kRatio; ++i)
    sources.push_back(i);
  std::vector<Bf16> out(static_cast<size_t>(groups * kCols));
  ThreadPool pool(flags.threads);
  const Launch launch{.pool = &pool};
  const CompressPoolParams params = {
      .kv_score = MakeView(kv_score.data(), groups * kRatio, 2 * kCols),
      .carry = {carry.data(), CacheFormat::kF32, 1, 2 * kCols},
      .ratio = kRatio,
      .sources = sources.data(),
      .out = MakeView(out.data(), groups, kCols)};
  const ThreadPool::Step step(pool);
  const double seconds = MedianSeconds(flags, [&] { CompressPoolCpu(params, launch); });
  const MachineRates rates = MeasureMachineRates(kv_score.size() * sizeof(float));
  const OpWork per_token = ExpOps() + OpWork{.fma = 1, .simple = 3, .divide = 1};
  const OpWork work =
      (per_token.Times(kRatio) + StoreBf16(rates)).Times(static_cast<double>(out.size())) +
      OpWork{.read = static_cast<double>(kv_score.size()) * 4,
             .written = static_cast<double>(out.size()) * 2};
  PrintBenchLine(flags, "compress_pool 2 x 512 groups=" + std::to_string(groups), seconds,
                 {{"us/row", seconds / static_cast<double>(groups) * 1e6}},
                 BoundSeconds(rates, work, flags.threads) / seconds);
}

void RunAll(const BenchFlags& flags) {
  RunPool(flags, 3);
  if (flags.smoke) {
    RunCase(flags, {3, 2, 64, 16, 8, 40});
    return;
  }
  RunPool(flags, 32);
  for (const int64_t rows : {1, 6, 64, 256})
    RunCase(flags, {rows, 4, 512, 128, 64, 300});
  for (const int64_t rows : {1, 6, 64})
    RunCase(flags, {rows, 32, 512, 128, 512, 4000});
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::BenchMain(argc, argv, twinspark::RunAll);
}
