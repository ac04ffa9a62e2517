// Speed of one layer of routed experts on a GPU, and that a row keeps its bits.
//
//   moe_gpu_bench [--json=PATH] [--quick] [--rows=N] [--min-rows=N] [--max-rows=N] [--bits=N]
//                 [--path=1|2] [--soak=ROUNDS]
//
// The half layer of two ranks: 384 experts, 5120 -> 1152 -> 5120, 6 a row, activation limit 10.
// Three layers of random weights in turn, 24 different routings per graph (chunks: 6 calls,
// queued), median of the replays. "ceiling": the distinct experts' weights at 4.4 T a second;
// "anchor": the best of both releases of the EXL3 reference implementation as measured on the same
// kind of card. --soak times nothing: calls of all sizes, one behind the other without a pause,
// compared on the GPU with the first answer for the same rows, as often as asked.
#include "kernels/cuda/gpu_test_util_cuda.cuh"
#include "kernels/moe/moe_cuda.h"

namespace twinspark {
namespace {

using namespace gpu_test;  // NOLINT(google-build-using-namespace)

constexpr int kD = 5120, kInner = 1152, kExperts = 384, kChosen = 6, kLayers = 3, kRoutings = 24;
constexpr int kMostDecodeRows = 48;  // of decode and verification; more is a chunk of a prompt

struct Layer {
  DeviceArray<uint8_t> trellis;
  DeviceArray<__half> vectors;
  DeviceArray<exl3::MoeExpert> table;
};

Layer MakeLayer(int bits, uint64_t seed) {
  Layer layer;
  const size_t matrix = static_cast<size_t>(kD) * kInner / 8 * static_cast<size_t>(bits);
  const size_t vectors = 3 * (kD + kInner);
  layer.trellis = DeviceArray<uint8_t>(3 * matrix * kExperts);
  layer.vectors = DeviceArray<__half>(vectors * kExperts);
  FillBits<<<2048, 256>>>(reinterpret_cast<uint32_t*>(layer.trellis.get()),
                          layer.trellis.size() / 4, seed);
  Randomize(layer.vectors.get(), layer.vectors.size(), seed + 1, true, 0.1f);
  std::vector<exl3::MoeExpert> experts(kExperts);
  for (int e = 0; e < kExperts; ++e) {
    exl3::MoeExpert& x = experts[static_cast<size_t>(e)];
    const uint8_t* t = layer.trellis.get() + 3 * matrix * static_cast<size_t>(e);
    const __half* v = layer.vectors.get() + vectors * static_cast<size_t>(e);
    x.gate = t;
    x.up = t + matrix;
    x.down = t + 2 * matrix;
    x.gate_suh = v;
    x.up_suh = v + kD;
    x.gate_svh = v + 2 * kD;
    x.up_svh = v + 2 * kD + kInner;
    x.down_suh = v + 2 * kD + 2 * kInner;
    x.down_svh = v + 2 * kD + 3 * kInner;
  }
  layer.table = DeviceArray<exl3::MoeExpert>(experts);
  return layer;
}

struct Random {
  uint64_t state;
  double Next() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<double>(state >> 11) / 9007199254740992.0;
  }
};

// Ids of `rows` rows; skewed: popularity ~ 1 / (rank + 8). Adds up the distinct experts.
std::vector<int32_t> MakeIds(int rows, bool skewed, Random& random, double* distinct) {
  std::vector<double> cumulative(kExperts);
  double sum = 0;
  for (int e = 0; e < kExperts; ++e) {
    sum += skewed ? 1.0 / (e + 8) : 1.0;
    cumulative[static_cast<size_t>(e)] = sum;
  }
  std::vector<int32_t> ids;
  std::vector<bool> hit(kExperts);
  for (int r = 0; r < rows; ++r) {
    std::vector<int32_t> row;
    while (row.size() < kChosen) {
      const double u = random.Next() * sum;
      const int rank = static_cast<int>(std::lower_bound(cumulative.begin(), cumulative.end(), u) -
                                        cumulative.begin());
      const int id = (std::min(rank, kExperts - 1) * 131) % kExperts;  // popular ones anywhere
      if (std::find(row.begin(), row.end(), id) == row.end()) row.push_back(id);
    }
    for (int id : row)
      hit[static_cast<size_t>(id)] = true;
    ids.insert(ids.end(), row.begin(), row.end());
  }
  *distinct += static_cast<double>(std::count(hit.begin(), hit.end(), true));
  return ids;
}

struct Row {
  int bits;
  bool skewed;
  int rows;
  double anchor_us;  // 0: not measured
};

const Row kRows[] = {
    {3, false, 1, 67.0},    {3, false, 2, 123.3},    {3, false, 4, 225.8},  {3, false, 6, 299.8},
    {3, false, 8, 393.4},   {3, false, 16, 704},     {3, false, 24, 976},   {3, false, 48, 1798},
    {3, true, 1, 67.8},     {3, true, 2, 123.8},     {3, true, 4, 214.3},   {3, true, 6, 294.9},
    {3, true, 8, 360.9},    {3, true, 16, 617},      {3, true, 24, 812},    {3, true, 48, 1632},
    {2, false, 1, 63.1},    {2, false, 2, 114.6},    {2, false, 4, 211.1},  {2, false, 6, 282.4},
    {2, false, 8, 371.1},   {2, false, 16, 657},     {2, false, 24, 900},   {2, false, 48, 1825},
    {3, false, 128, 5220},  {3, false, 256, 6000},   {3, false, 512, 6370}, {3, false, 1024, 7010},
    {3, false, 2048, 8910}, {3, false, 4096, 14070}, {3, true, 128, 4180},  {3, true, 256, 5510},
    {3, true, 512, 7190},   {3, true, 1024, 7900},   {3, true, 2048, 9700}, {3, true, 4096, 12300},
};

MoeCudaParams Params(int bits, int rows) {
  MoeCudaParams p;
  p.rows = rows;
  p.d = kD;
  p.inner = kInner;
  p.num_experts = kExperts;
  p.num_chosen = kChosen;
  p.gate_up_bits = p.down_bits = bits;
  p.limit = 10;
  p.x_type = exl3::kTypeF16;
  p.out_type = exl3::kTypeF32;
  p.x_stride = p.out_stride = kD;
  return p;
}

// What differs between two answers: rows, numbers, and where the first row of them is.
struct Difference {
  uint32_t rows, numbers, first_row, first_col, last_col;
};

// A block a row. `first_row` and `first_col` begin as the largest number.
__global__ void FindDifference(const uint32_t* want,
                               const uint32_t* got,
                               int width,
                               Difference* found) {
  __shared__ uint32_t numbers;
  if (threadIdx.x == 0) numbers = 0;
  __syncthreads();
  const size_t begin = static_cast<size_t>(blockIdx.x) * static_cast<size_t>(width);
  for (int i = static_cast<int>(threadIdx.x); i < width; i += static_cast<int>(blockDim.x)) {
    if (want[begin + static_cast<size_t>(i)] == got[begin + static_cast<size_t>(i)]) continue;
    atomicAdd(&numbers, 1u);
    atomicMin(&found->first_col, static_cast<uint32_t>(i));
    atomicMax(&found->last_col, static_cast<uint32_t>(i));
  }
  __syncthreads();
  if (threadIdx.x != 0 || numbers == 0) return;
  atomicAdd(&found->rows, 1u);
  atomicAdd(&found->numbers, numbers);
  atomicMin(&found->first_row, blockIdx.x);
}

// `run` as in Main. Returns how many calls differed.
template <class Run>
int Soak(int bits, int rounds, const int32_t* ids, float* want, float* part, const Run& run) {
  constexpr int kMost = 4096, kSizes[] = {1, 2, 3, 4, 6, 8, 16, 24, 48, 64, 1000, 4096};
  run(0, ids, 0, kMost, want, nullptr);
  int failed = 0;
  for (int rows : kSizes) {
    // Small calls are many, and back to back: the end of one meets the start of the next.
    const bool small = rows <= kMostDecodeRows;
    const int calls = small ? 12 : 1, repeats = small ? 8 : rows <= 1000 ? 4 : 1;
    std::vector<Difference> zero(static_cast<size_t>(calls), Difference{0, 0, ~0u, ~0u, 0});
    int64_t different = 0;
    for (int round = 0; round < rounds * repeats; ++round) {
      const DeviceArray<Difference> found(zero);
      auto first = [&](int i) { return (round * 131 + i * 377) % (kMost - rows + 1); };
      auto to = [&](int i) { return part + static_cast<size_t>(i * rows) * kD; };
      GPU_CHECK(cudaMemset(part, 0xff, static_cast<size_t>(calls * rows) * kD * 4));
      for (int i = 0; i < calls; ++i)
        run(0, ids, first(i), rows, to(i), nullptr);
      for (int i = 0; i < calls; ++i) {
        FindDifference<<<static_cast<unsigned>(rows), 256>>>(
            reinterpret_cast<const uint32_t*>(want + static_cast<size_t>(first(i)) * kD),
            reinterpret_cast<const uint32_t*>(to(i)), kD, found.get() + i);
      }
      for (const Difference& d : found.ToHost()) {
        if (d.rows == 0) continue;
        if (++different <= 5) {
          std::printf(
              "  K=%d, %d rows, round %d: %u rows and %u numbers differ, from row %u, columns "
              "%u..%u\n",
              bits, rows, round, d.rows, d.numbers, d.first_row, d.first_col, d.last_col);
        }
      }
    }
    std::printf("K=%d soak, %4d rows: %lld of %d calls differ\n", bits, rows,
                static_cast<long long>(different), rounds * repeats * calls);
    failed += static_cast<int>(different);
  }
  return failed;
}

int Main(int argc, char** argv) {
  const bool quick = Flag(argc, argv, "quick");
  auto number = [&](const char* name, int otherwise) {
    const char* text = Option(argc, argv, name);
    return text != nullptr ? std::atoi(text) : otherwise;
  };
  const int only_rows = number("rows", 0), only_bits = number("bits", 0);
  const int min_rows = number("min-rows", 1), max_rows = number("max-rows", kMaxMoeRows);
  const MoePath path = static_cast<MoePath>(number("path", 0));
  const JsonLines json(Option(argc, argv, "json"));
  const CudaDevice device = ThisDevice();
  constexpr int kMost = 4096;
  DeviceArray<__half> x(static_cast<size_t>(kMost) * kD);
  Randomize(x.get(), x.size(), 5);
  DeviceArray<float> out(static_cast<size_t>(kMost) * kD), part(static_cast<size_t>(kMost) * kD);
  std::vector<float> h_weights(static_cast<size_t>(kMost) * kChosen, 0.25f);
  Random random{99};
  for (float& w : h_weights)
    w = static_cast<float>(0.1 + 0.4 * random.Next());
  const DeviceArray<float> weights(h_weights);
  const Workspace workspace(MoeCudaWorkspaceBytes(Params(3, kMost), kMost));
  int64_t total_mismatches = 0;
  std::printf("%-12s %5s %8s %9s %9s %8s %7s %7s\n", "K routing", "rows", "distinct", "us",
              "ceiling", "share", "anchor", "ratio");
  for (int bits : {3, 2}) {
    if (only_bits != 0 && bits != only_bits) continue;
    std::vector<Layer> layers;
    for (int i = 0; i < kLayers; ++i)
      layers.push_back(MakeLayer(bits, 10 * static_cast<uint64_t>(i) + 1));
    int64_t compared = 0, mismatches = 0;
    auto run = [&](int layer, const int32_t* ids, int first, int rows, float* to,
                   cudaStream_t stream) {
      MoeCudaParams p = Params(bits, rows);
      p.path = path;
      p.experts = layers[static_cast<size_t>(layer)].table.get();
      p.ids = ids + first * kChosen;
      p.weights = weights.get() + first * kChosen;
      p.x = x.get() + static_cast<size_t>(first) * kD;
      p.out = to;
      GPU_CHECK_OK(MoeCuda(p, device, workspace.view(), stream));
    };
    if (const int rounds = number("soak", 0); rounds > 0) {
      for (bool skewed : {false, true}) {
        double unused = 0;
        const DeviceArray<int32_t> ids(MakeIds(kMost, skewed, random, &unused));
        total_mismatches += Soak(bits, rounds, ids.get(), out.get(), part.get(), run);
      }
      continue;
    }
    for (bool skewed : {false, true}) {
      double unused = 0;
      const DeviceArray<int32_t> ids(MakeIds(kMost, skewed, random, &unused));
      run(0, ids.get(), 0, kMost, out.get(), nullptr);
      const std::vector<float> want = out.ToHost();
      for (int rows : {1, 2, 6, 8, 48, 64, 1000}) {
        for (int first : {0, 777, kMost - rows}) {
          GPU_CHECK(cudaMemset(part.get(), 0xff, part.size() * 4));
          run(0, ids.get(), first, rows, part.get(), nullptr);
          const std::vector<float> got = part.ToHost();
          for (int r = 0; r < rows; ++r) {
            ++compared;
            mismatches +=
                std::memcmp(got.data() + static_cast<size_t>(r) * kD,
                            want.data() + static_cast<size_t>(first + r) * kD, kD * 4) != 0;
          }
        }
      }
    }
    total_mismatches += mismatches;
    for (const Row& row : kRows) {
      if (row.bits != bits || (quick && row.rows > 8 && row.rows != 48 && row.rows != 1024))
        continue;
      if ((only_rows != 0 && row.rows != only_rows) || row.rows < min_rows || row.rows > max_rows)
        continue;
      const bool chunk = row.rows > kMostDecodeRows;
      const int routings = chunk ? 6 : kRoutings;
      double distinct = 0;
      std::vector<DeviceArray<int32_t>> ids;
      for (int i = 0; i < routings; ++i)
        ids.emplace_back(MakeIds(row.rows, row.skewed, random, &distinct));
      distinct /= routings;
      const double us = TimeGraph(routings, chunk ? 3 : 8, [&](int i, cudaStream_t stream) {
        run(i % kLayers, ids[static_cast<size_t>(i)].get(), 0, row.rows, out.get(), stream);
      });
      const double weights_decoded = distinct * 3 * kD * kInner;
      const double ceiling = weights_decoded / 4.4e6;
      const double read_us = weights_decoded * bits / 8 / 4.55e6;
      std::printf("K=%d %-8s %5d %8.1f %9.1f %9.1f %7.1f%% %7.0f %6.2fx\n", bits,
                  row.skewed ? "skewed" : "uniform", row.rows, distinct, us, ceiling,
                  100 * ceiling / us, row.anchor_us, row.anchor_us / us);
      json.Write(
          "{\"op\": \"moe\", \"bits\": %d, \"routing\": \"%s\", \"rows\": %d, \"distinct\": %.1f, "
          "\"us\": %.2f, \"read_us\": %.1f, \"decode_us\": %.1f, \"share_of_floor\": %.3f, "
          "\"tflops\": %.1f, "
          "\"anchor_us\": %.1f, \"ratio\": %.3f, \"rows_compared_bitwise\": %lld, \"mismatches\": "
          "%lld}",
          bits, row.skewed ? "skewed" : "uniform", row.rows, distinct, us, read_us, ceiling,
          std::max(read_us, ceiling) / us, 2.0 * row.rows * kChosen * 3 * kD * kInner / us * 1e-6,
          row.anchor_us, row.anchor_us / us, static_cast<long long>(compared),
          static_cast<long long>(mismatches));
    }
    std::printf("K=%d: %lld rows compared bit for bit, %lld mismatches\n", bits,
                static_cast<long long>(compared), static_cast<long long>(mismatches));
  }
  return total_mismatches == 0 ? 0 : 1;
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::Main(argc, argv);
}
