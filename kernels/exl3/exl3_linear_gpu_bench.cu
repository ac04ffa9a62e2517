// Speed of the EXL3 linear on a GPU, and that a row keeps its bits whatever the number of rows.
//
//   exl3_linear_gpu_bench [--json=PATH] [--quick] [--shape=NAME]
//   exl3_linear_gpu_bench --sweep [--chosen [--extra=SEGMENTS]]    every path (LinearPath) of many
//   cuts; --chosen: of the cut that calls have, and one more
//   exl3_linear_gpu_bench --shape=NAME --probe=SEGMENTS,PATH,ROWS    a few plain calls, for a
//   profiler; PATH is the number of a LinearPath
//
// Method: graphs of 24 to 160 calls over weight copies of more than L2 (600 MB, or 160 copies), two
// warm-up replays, median of eight. Inputs f16 normal, output f16. "floor" is the larger of reading
// the bytes (a plain kernel that only fetches them, measured on the same kind of card) and weights
// / 4.4 T, the rate of exact decode measured from registers. "anchor" is the best of both releases
// of the EXL3 reference implementation on the same kind of card, whatever its path; 0: not
// measured. A time counts only if `mismatches` is 0.
#include "kernels/cuda/gpu_test_util_cuda.cuh"
#include "kernels/exl3/exl3_linear_cuda.h"

namespace twinspark {
namespace {

using namespace gpu_test;  // NOLINT(google-build-using-namespace)

constexpr int kNumRowCounts = 11;
constexpr int kRowCounts[kNumRowCounts] = {1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64};

struct Shape {
  const char* name;
  int k, n, bits, count;  // count matrices in one call
  bool main_list;
  double read_us;
  double anchor[kNumRowCounts];
  double exact[2];  // best exact path at 1 and 2 rows
};

// Best of both releases and all paths (forced decode + cuBLAS from 8 rows on).
const Shape kShapes[] = {
    {"wq_a",
     5120,
     1280,
     5,
     1,
     true,
     2.4,
     {12.1, 15.1, 21.7, 21.8, 17.1, 17.2, 17.4, 17.6, 17.8, 18.4, 19.0},
     {21.5, 21.6}},
    {"wq_b_half",
     1280,
     16384,
     5,
     1,
     true,
     4.7,
     {16.4, 20.8, 21.1, 22.3, 22.6, 24.1, 24.2, 29.2, 29.6, 31.7, 38.8},
     {20.5, 20.8}},
    {"wo_a_slice",
     4096,
     1024,
     5,
     1,
     true,
     2.1,
     {10.1, 11.6, 20.1, 20.3, 14.4, 14.5, 14.6, 15.2, 15.8, 15.9, 15.9},
     {19.97, 20.1}},
    {"wo_b_half",
     4096,
     5120,
     5,
     1,
     true,
     4.7,
     {17.3, 22.3, 25.8, 25.9, 26.0, 26.5, 26.8, 31.8, 32.6, 37.4, 43.4},
     {25.66, 25.7}},
    {"expert_w1_k3",
     5120,
     1152,
     3,
     1,
     true,
     2.0,
     {16.64, 16.5, 16.8, 16.8, 15.9, 16.0, 16.1, 16.4, 16.6, 17.2, 17.8},
     {16.64, 16.5}},
    {"expert_w1_k2",
     5120,
     1152,
     2,
     1,
     true,
     1.8,
     {15.62, 15.5, 15.8, 15.7, 15.7, 15.8, 15.9, 16.2, 16.4, 17.0, 17.5},
     {15.62, 15.5}},
    {"expert_w2_k3",
     1152,
     5120,
     3,
     1,
     true,
     2.0,
     {9.1, 9.6, 9.9, 10.0, 10.1, 14.1, 14.4, 15.2, 15.5, 16.1, 16.6},
     {9.4, 9.6}},
    {"expert_w2_k2",
     1152,
     5120,
     2,
     1,
     true,
     1.8,
     {9.1, 9.2, 9.5, 9.6, 9.7, 14.1, 14.4, 15.1, 15.4, 16.0, 16.4},
     {9.1, 9.2}},
    {"shared_w1_full",
     5120,
     2304,
     5,
     1,
     true,
     3.4,
     {12.74, 15.3, 22.6, 22.8, 23.0, 23.4, 23.6, 23.9, 24.3, 25.2, 26.0},
     {22.43, 22.7}},
    {"head_half",
     5120,
     64640,
     6,
     1,
     true,
     55.2,
     {259.0, 260.6, 260.8, 260.9, 260.9, 264.0, 264.7, 326.0, 327.7, 340.5, 389.8},
     {259.0, 260.6}},
    {"engram_half",
     6144,
     12800,
     5,
     1,
     true,
     12.6,
     {30.1, 40.0, 48.5, 50.1, 51.6, 54.2, 56.9, 83.2, 83.7, 91.4, 102.1},
     {47.9, 48.5}},
    {"wo_a_x4",
     4096,
     1024,
     5,
     4,
     false,
     4.1,
     {25.1, 25.2, 25.1, 25.3, 25.4, 0, 25.8, 0, 29.9, 0, 0},
     {25.1, 25.2}},
    {"gate_up_k3",
     5120,
     1152,
     3,
     2,
     false,
     2.5,
     {24.1, 23.7, 24.1, 23.9, 24.1, 0, 25.3, 0, 30.2, 0, 0},
     {24.1, 23.7}},
    {"gate_up_k5",
     5120,
     1152,
     5,
     2,
     false,
     3.4,
     {25.1, 25.1, 25.1, 25.6, 25.7, 0, 26.5, 0, 31.0, 0, 0},
     {25.1, 25.1}},
    {"wkv",
     5120,
     512,
     5,
     1,
     false,
     1.8,
     {10.6, 11.9, 21.6, 21.8, 21.9, 0, 23.4, 0, 0, 0, 0},
     {21.3, 21.5}},
    {"shared_w2_half",
     1152,
     5120,
     5,
     1,
     false,
     2.3,
     {9.16, 11.6, 14.2, 14.2, 14.3, 0, 15.0, 0, 0, 0, 0},
     {14.0, 14.1}},
    {"wo_b_full",
     8192,
     5120,
     5,
     1,
     false,
     7.6,
     {25.97, 33.8, 39.5, 40.1, 40.5, 0, 42.7, 0, 0, 0, 0},
     {39.3, 39.3}},
    {"indexer_wk",
     512,
     128,
     8,
     1,
     false,
     1.6,
     {9.1, 10.1, 10.2, 10.4, 10.4, 0, 11.5, 0, 0, 0, 0},
     {9.1, 10.1}},
    {"main_proj",
     15360,
     5120,
     4,
     1,
     false,
     10.4,
     {34.7, 34.7, 51.9, 52.4, 53.0, 0, 56.3, 0, 0, 0, 0},
     {51.28, 51.4}},
};

constexpr double kWeightsPerUs = 4.4e6;

constexpr const char* kPathNames[kNumLinearPaths] = {
    "auto",     "tasks",           "tasks of two",      "tasks warpgroup",
    "clusters", "clusters of two", "clusters streamed", "two streamed"};

Exl3LinearCudaParams Params(const Shape& s, int rows) {
  Exl3LinearCudaParams p;
  p.k = s.k;
  p.bits = s.bits;
  p.rows = rows;
  p.num_matrices = s.count;
  p.x_type = exl3::kTypeF16;
  p.y_type = exl3::kTypeF16;
  return p;
}

struct Copies {
  std::vector<RandomMatrix> matrices;
};

// Runs rows [first, first + rows) of x through copy 0 (f32 output).
void RunRows(const Shape& s,
             const Copies& copies,
             const __half* x,
             int first,
             int rows,
             float* y,
             const CudaDevice& device,
             const Workspace& workspace,
             int segments) {
  Exl3LinearCudaParams p = Params(s, rows);
  p.y_type = exl3::kTypeF32;
  p.num_segments = segments;
  const int64_t width = static_cast<int64_t>(s.n) * s.count;
  for (int i = 0; i < s.count; ++i) {
    p.matrices[i] = copies.matrices[static_cast<size_t>(i)].Bind(
        x + static_cast<int64_t>(first) * s.k, s.k, y + i * s.n, width);
  }
  GPU_CHECK_OK(Exl3LinearCuda(p, device, workspace.view(), nullptr));
}

struct Invariance {
  int64_t rows = 0, mismatches = 0;
};

// Rows of a 4,096-row call against the same rows in calls of 1, 6, 48, 64 and 1,000.
Invariance CheckInvariance(const Shape& s,
                           const Copies& copies,
                           const CudaDevice& device,
                           const Workspace& workspace,
                           int max_rows) {
  const int64_t width = static_cast<int64_t>(s.n) * s.count;
  DeviceArray<__half> x(static_cast<size_t>(max_rows) * s.k);
  Randomize(x.get(), x.size(), 77);
  DeviceArray<float> all(static_cast<size_t>(max_rows) * width),
      part(static_cast<size_t>(1000) * width);
  RunRows(s, copies, x.get(), 0, max_rows, all.get(), device, workspace, 0);
  Invariance result;
  const std::vector<float> want = all.ToHost();
  for (int rows : {1, 2, 6, 17, 48, 64, 100, 1000}) {
    if (rows > max_rows) continue;
    for (int first : {0, (max_rows - rows) / 3, max_rows - rows}) {
      GPU_CHECK(cudaMemset(part.get(), 0xff, part.size() * sizeof(float)));
      RunRows(s, copies, x.get(), first, rows, part.get(), device, workspace, 0);
      const std::vector<float> got = part.ToHost();
      for (int r = 0; r < rows; ++r) {
        const bool same = std::memcmp(got.data() + r * width, want.data() + (first + r) * width,
                                      static_cast<size_t>(width) * sizeof(float)) == 0;
        ++result.rows;
        result.mismatches += !same;
      }
    }
  }
  return result;
}

int Main(int argc, char** argv) {
  const bool quick = Flag(argc, argv, "quick"), sweep = Flag(argc, argv, "sweep");
  const char* only = Option(argc, argv, "shape");
  const JsonLines json(Option(argc, argv, "json"));
  const CudaDevice device = ThisDevice();
  double log_ratio[kNumRowCounts] = {}, log_exact[2] = {}, log_us[kNumRowCounts] = {};
  int main_count = 0;
  int64_t total_mismatches = 0;
  for (int blocks : {1, 2}) {
    std::printf("clusters of 1 to %d with %d blocks per SM:", kMaxClusterSize, blocks);
    for (int size = 1; size <= kMaxClusterSize; ++size)
      std::printf(" %d", device.cluster_places[blocks - 1][size]);
    std::printf("\n");
  }
  std::printf("%-15s %3s %6s %2s", "shape", "K", "floor", "S");
  for (int rows : kRowCounts)
    std::printf(" %12d", rows);
  std::printf("   rows compared, mismatches\n");
  for (const Shape& s : kShapes) {
    if (only != nullptr && std::strcmp(only, s.name) != 0) continue;
    if (quick && !s.main_list) continue;
    const size_t bytes = static_cast<size_t>(s.k) * s.n / 8 * s.bits * s.count;
    const int copies_wanted =
        static_cast<int>(std::min<size_t>(160, std::max<size_t>(2, 600000000 / bytes + 1)));
    Copies copies;
    for (int i = 0; i < copies_wanted * s.count; ++i) {
      copies.matrices.emplace_back(s.k, s.n, s.bits, 1000 + 3 * static_cast<uint64_t>(i), false);
    }
    const int calls = std::max(24, copies_wanted);
    const int max_rows = quick ? 1000 : 4096;
    Exl3LinearCudaParams shape = Params(s, max_rows);
    DeviceArray<__half> x(static_cast<size_t>(64) * s.k),
        y(static_cast<size_t>(64) * s.n * s.count);
    Randomize(x.get(), x.size(), 7);
    for (int i = 0; i < s.count; ++i) {
      shape.matrices[i] = copies.matrices[static_cast<size_t>(i)].Bind(x.get(), s.k, y.get(), s.n);
    }
    const Workspace workspace(Exl3LinearWorkspaceBytes(shape, device, max_rows) +
                              (size_t{256} << 20));
    auto params = [&](int rows, int segments, LinearPath path, int i) {
      Exl3LinearCudaParams p = Params(s, rows);
      p.num_segments = segments;
      p.path = path;
      for (int j = 0; j < s.count; ++j) {
        p.matrices[j] =
            copies.matrices[static_cast<size_t>((i % copies_wanted) * s.count + j)].Bind(
                x.get(), s.k, y.get() + j * s.n, static_cast<int64_t>(s.n) * s.count);
      }
      return p;
    };
    // 0 if the path does not exist for the shape.
    auto time = [&](int rows, int segments, LinearPath path) {
      Exl3LinearPlan plan;
      if (!PlanExl3Linear(params(rows, segments, path, 0), device, &plan).ok()) return 0.0;
      return TimeGraph(calls, quick ? 4 : 8, [&](int i, cudaStream_t stream) {
        GPU_CHECK_OK(
            Exl3LinearCuda(params(rows, segments, path, i), device, workspace.view(), stream));
      });
    };
    const int units = s.n / 128 * s.count;
    const double floor =
        std::max(s.read_us, static_cast<double>(s.k) * s.n * s.count / kWeightsPerUs);
    if (const char* probe = Option(argc, argv, "probe")) {
      int segments = 0, path = 0, rows = 1;
      if (std::sscanf(probe, "%d,%d,%d", &segments, &path, &rows) != 3) return 2;
      std::printf("%s: %.2f us\n", s.name, time(rows, segments, static_cast<LinearPath>(path)));
      for (int i = 0; i < 4; ++i) {
        Exl3LinearCudaParams p = params(rows, segments, static_cast<LinearPath>(path), i);
        GPU_CHECK_OK(Exl3LinearCuda(p, device, workspace.view(), nullptr));
      }
      GPU_CHECK(cudaDeviceSynchronize());
      continue;
    }
    if (sweep) {
      // Cuts, and for each the paths (LinearPath).
      const int chosen = Exl3Segments(s.k, units);
      for (int segments : {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 16}) {
        const char* extra = Option(argc, argv, "extra");
        if (Flag(argc, argv, "chosen") && segments != chosen &&
            (extra == nullptr || segments != std::atoi(extra)))
          continue;
        if (segments > s.k / 128 || (segments != chosen && units * segments > 400)) continue;
        for (int path = 1; path < kNumLinearPaths; ++path) {
          if (path <= static_cast<int>(LinearPath::kTasksWarpgroup) && segments != chosen) continue;
          bool any = false;
          for (int rows : {1, 2, 4, 6, 8, 12, 16, 24, 32, 48}) {
            const double us = time(rows, segments, static_cast<LinearPath>(path));
            if (us == 0) continue;
            if (!any) std::printf("%-15s S %2d %-20s", s.name, segments, kPathNames[path]);
            any = true;
            std::printf("  %d: %.2f", rows, us);
          }
          if (any) std::printf("\n");
        }
      }
      std::printf("%-15s chosen %d\n", s.name, Exl3Segments(s.k, units));
      std::fflush(stdout);
      continue;
    }
    const Invariance same = CheckInvariance(s, copies, device, workspace, max_rows);
    total_mismatches += same.mismatches;
    std::printf("%-15s %3d %6.2f %2d", s.name, s.bits, floor, Exl3Segments(s.k, units));
    for (int i = 0; i < kNumRowCounts; ++i) {
      const double us = time(kRowCounts[i], 0, LinearPath::kAuto);
      const double ratio = s.anchor[i] / us;
      std::printf(" %6.2f %4.2fx", us, ratio);
      json.Write(
          "{\"op\": \"exl3_linear\", \"shape\": \"%s\", \"k\": %d, \"n\": %d, \"matrices\": %d, "
          "\"bits\": %d, "
          "\"rows\": %d, \"us\": %.3f, \"read_us\": %.2f, \"decode_us\": %.2f, \"share_of_floor\": "
          "%.3f, "
          "\"anchor_us\": %.2f, \"ratio\": %.3f, \"rows_compared_bitwise\": %lld, \"mismatches\": "
          "%lld}",
          s.name, s.k, s.n, s.count, s.bits, kRowCounts[i], us, s.read_us,
          static_cast<double>(s.k) * s.n * s.count / kWeightsPerUs, floor / us, s.anchor[i], ratio,
          static_cast<long long>(same.rows), static_cast<long long>(same.mismatches));
      if (s.main_list) {
        log_ratio[i] += std::log(ratio);
        log_us[i] += std::log(us);
        if (i < 2) log_exact[i] += std::log(s.exact[i] / us);
      }
    }
    main_count += s.main_list;
    std::printf("   %lld %lld\n", static_cast<long long>(same.rows),
                static_cast<long long>(same.mismatches));
    std::fflush(stdout);
  }
  if (!sweep && main_count > 0) {
    std::printf("geometric mean over the %d main shapes:\n", main_count);
    for (int i = 0; i < kNumRowCounts; ++i) {
      std::printf("  rows %2d: %6.2f us  %.2fx", kRowCounts[i], std::exp(log_us[i] / main_count),
                  std::exp(log_ratio[i] / main_count));
      if (i < 2) std::printf("  (exact paths %.2fx)", std::exp(log_exact[i] / main_count));
      std::printf("\n");
    }
  }
  return total_mismatches == 0 ? 0 : 1;
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::Main(argc, argv);
}
