// Checks the CUDA kernels on a GPU, with nothing but the CUDA compiler at hand.
//
//   device_check [--vectors=DIR] [--quick] [--seed=N] [--from=I] [--linear=N]
//   device_check --ring=lane-zero|stores|every-lane|too-early
//
// 1 codebooks: the naive table against the specification's checksum, all 65,536 states.
// 2 golden vectors: decode and rotated input (every form) bit for bit, output within 1e-3 of its
// rms. 3 decode: 3 codebooks x K 1..8 on random bits against a naive decoder, bit for bit, both
// bases. 4 linear: random shapes, K, codebooks and row counts against float64, and every row's bits
// against
//   the same row in another call; graph against eager; two streams at once.
// 5 experts: the same, uniform, skewed and all rows on the same experts.
// Exit code 0 only if everything holds. Also run under compute-sanitizer with --quick; --from
// leaves out the first I linear cases (the first two have hundreds of blocks), --linear runs N of
// them and nothing after them. --ring runs nothing but one form of the ring of the product kernels
// (ring_check_cuda.cuh).
#include <fstream>
#include <sstream>
#include <thread>

#include "kernels/cuda/gpu_test_util_cuda.cuh"
#include "kernels/cuda/ring_check_cuda.cuh"
#include "kernels/exl3/exl3_linear_cuda.h"
#include "kernels/exl3/exl3_rotate_cuda.cuh"
#include "kernels/moe/moe_cuda.h"

namespace twinspark {
namespace {

using namespace gpu_test;  // NOLINT(google-build-using-namespace)

int failures = 0;

void Expect(bool ok, const char* format, ...) {
  char text[300];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof(text), format, args);
  va_end(args);
  if (!ok) ++failures;
  if (!ok || std::getenv("VERBOSE") != nullptr) std::printf("%s %s\n", ok ? "ok  " : "FAIL", text);
}

struct Random {
  uint64_t state;
  uint32_t Next() {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    return static_cast<uint32_t>(state >> 33);
  }
  int Below(int n) { return static_cast<int>(Next() % static_cast<uint32_t>(n)); }
};

void CheckCodebooks() {
  const uint64_t want[3] = {0xfad431e7e9266898ull, 0x7bb36b05a3b885a7ull, 0x55e1c748ed9f0cd7ull};
  for (int codebook = 0; codebook < 3; ++codebook) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (uint16_t v : CodebookTable(codebook)) {
      hash = (hash ^ (v & 255)) * 0x100000001b3ull;
      hash = (hash ^ (v >> 8)) * 0x100000001b3ull;
    }
    Expect(hash == want[codebook], "codebook %d: checksum %llx", codebook,
           static_cast<unsigned long long>(hash));
  }
}

// --- golden vectors ---

template <class T>
std::vector<T> Take(const std::string& file, size_t& offset, size_t count) {
  std::vector<T> v(count);
  offset = (offset + 15) / 16 * 16;
  if (offset + count * sizeof(T) > file.size()) {
    std::fprintf(stderr, "vector file too short: %zu bytes\n", file.size());
    std::exit(2);
  }
  std::memcpy(v.data(), file.data() + offset, count * sizeof(T));
  offset += count * sizeof(T);
  return v;
}

std::string ReadFile(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  std::stringstream s;
  s << in.rdbuf();
  return s.str();
}

// Every way in which kernels rotate an input, into one buffer of the layout of
// exl3_rotate_cuda.cuh (one tile of rows): 0: a warp per 128 channels, 1: 16 channels a lane.
__global__ void RotateForms(
    const __half* x, const __half* suh, int k, int rows, int form, uint32_t* xh) {
  const int lane = static_cast<int>(threadIdx.x);
  const int block = static_cast<int>(blockIdx.x), groups = (rows + 7) / 8;
  const exl3::TilePlace place{0, groups, 0};
  if (form == 0) {
    for (int row = 0; row < rows; ++row) {
      exl3::TilePlace to = place;
      to.row = row;
      const int col = block * 128 + 4 * lane;
      const uint2 words = exl3::RotateInput(exl3::LoadHalf4(x, static_cast<int64_t>(row) * k + col),
                                            exl3::LoadHalf4(suh, col), lane, true);
      exl3::StoreRotated(xh, k / 32, to, block, lane, words);
    }
    return;
  }
  for (int row0 = 0; row0 < rows; row0 += 4) {
    const int row = row0 + (lane & 3), chunk = lane >> 2, col = block * 128 + chunk * 16;
    float v[16], scale[16];
    exl3::Load16(x + static_cast<int64_t>(min(row, rows - 1)) * k + col, exl3::kTypeF16, v);
    exl3::Load16(suh + col, exl3::kTypeF16, scale);
    for (int i = 0; i < 16; ++i)
      v[i] *= scale[i];
    const exl3::Fragments16 out = exl3::SwapHalves<2>(exl3::RotateScaled16<2>(v, lane, true), lane);
    if (row >= rows) continue;
    uint4* to = reinterpret_cast<uint4*>(xh + ((col / 32) * groups + row / 8) * 128 + row % 8 * 16 +
                                         (chunk & 1) * 8);
    to[0] = out.v[0];
    to[1] = out.v[1];
  }
}

// xh itself, bit for bit: of the kernel that rotates before the product (its buffer lies behind the
// counters), and of both forms.
void CheckRotated(const std::string& name,
                  const Exl3LinearCudaParams& params,
                  const std::vector<uint16_t>& want,
                  const CudaDevice& device,
                  const Workspace& workspace) {
  const int k = params.k, m = params.rows, groups = (m + 7) / 8;
  const size_t count = static_cast<size_t>(groups) * static_cast<size_t>(k) * 8;
  auto compare = [&](const uint16_t* buffer, bool warpgroup, const char* what) {
    std::vector<uint16_t> got(count);
    GPU_CHECK(cudaDeviceSynchronize());
    GPU_CHECK(cudaMemcpy(got.data(), buffer, count * 2, cudaMemcpyDeviceToHost));
    int different = 0;
    for (int row = 0; row < m; ++row) {
      for (int c = 0; c < k; ++c) {
        // Word of a couple: lane 4 row + t holds couples {t, t + 4} of both tile rows of a pair.
        const int couple = c % 32 / 2, t = couple % 4, word = couple / 4;
        // For warpgroup instructions: four blocks of 8 channels, [8 rows][8 channels].
        const size_t in_pair = warpgroup ? static_cast<size_t>(word * 32 + row % 8 * 4 + t)
                                         : static_cast<size_t>((4 * (row % 8) + t) * 4 + word);
        const size_t at = (static_cast<size_t>((c / 32) * groups + row / 8) * 128 + in_pair) * 2 +
                          static_cast<size_t>(c % 2);
        different +=
            got[at] !=
            want[static_cast<size_t>(row) * static_cast<size_t>(k) + static_cast<size_t>(c)];
      }
    }
    Expect(different == 0, "%s: xh (%s): %d of %d differ", name.c_str(), what, different, m * k);
  };
  for (int form : {0, 1}) {
    DeviceArray<uint16_t> xh(count);
    RotateForms<<<static_cast<unsigned>(k / 128), 32>>>(
        static_cast<const __half*>(params.matrices[0].x),
        static_cast<const __half*>(params.matrices[0].suh), k, m, form,
        reinterpret_cast<uint32_t*>(xh.get()));
    GPU_CHECK(cudaGetLastError());
    compare(xh.get(), false, form == 0 ? "4 channels a lane" : "16 channels a lane");
  }
  for (LinearPath path : {LinearPath::kClustersStreamed, LinearPath::kTasksWarpgroup}) {
    Exl3LinearCudaParams p = params;
    p.path = path;
    Exl3LinearPlan plan;
    if (!PlanExl3Linear(p, device, &plan).ok()) continue;  // not for this call or device
    GPU_CHECK_OK(Exl3LinearCuda(p, device, workspace.view(), nullptr));
    compare(reinterpret_cast<const uint16_t*>(static_cast<const char*>(workspace.view().data) +
                                              kCudaCounterBytes),
            plan.args.warpgroup != 0, plan.args.warpgroup != 0 ? "kernel, warpgroup" : "kernel");
  }
}

void CheckVectors(const std::string& dir, const CudaDevice& device) {
  const std::string manifest = ReadFile(dir + "/manifest.json");
  int cases = 0;
  for (size_t at = manifest.find("\"file\": \""); at != std::string::npos;
       at = manifest.find("\"file\": \"", at + 1)) {
    const size_t begin = at + 9, end = manifest.find('"', begin);
    const std::string name = manifest.substr(begin, end - begin);
    char codebook_name[16];
    int bits = 0, k = 0, n = 0;
    if (std::sscanf(name.c_str(), "%15[^_]_k%d_%dx%d.bin", codebook_name, &bits, &k, &n) != 4)
      continue;
    const int codebook = codebook_name[0] == '3' ? 0 : codebook_name[1] == 'c' ? 1 : 2;
    const size_t m_at = manifest.find("\"m\":", at);
    const int m = std::atoi(manifest.c_str() + m_at + 4);
    const std::string file = ReadFile(dir + "/" + name);
    const size_t kn = static_cast<size_t>(k) * static_cast<size_t>(n);
    size_t offset = 0;
    const auto trellis = Take<uint16_t>(file, offset, kn / 16 * static_cast<size_t>(bits));
    const auto suh = Take<__half>(file, offset, static_cast<size_t>(k));
    const auto svh = Take<__half>(file, offset, static_cast<size_t>(n));
    const auto wq = Take<uint16_t>(file, offset, kn);
    const auto x = Take<__half>(file, offset, static_cast<size_t>(m * k));
    const auto xh = Take<uint16_t>(file, offset, static_cast<size_t>(m * k));
    const auto y = Take<float>(file, offset, static_cast<size_t>(m * n));
    ++cases;

    const DeviceArray<uint16_t> d_trellis(trellis);
    const DeviceArray<__half> d_suh(suh), d_svh(svh), d_x(x);
    DeviceArray<uint16_t> d_wq(kn);
    DeviceArray<float> d_y(static_cast<size_t>(m * n));
    exl3::GemmMatrix matrix{};
    DeviceArray<uint8_t> prepared(kn / 8 * static_cast<size_t>(bits));
    GPU_CHECK_OK(Exl3PrepareCuda(d_trellis.get(), n, 0, k, n, bits, prepared.get(), nullptr));
    matrix.trellis = prepared.get();
    matrix.suh = d_suh.get();
    matrix.svh = d_svh.get();
    matrix.x = d_x.get();
    matrix.y = d_y.get();
    matrix.x_stride = matrix.x_cols = k;
    matrix.y_stride = matrix.y_cols = n;
    matrix.num_blocks = n / 128;
    Exl3ReconstructCudaParams r;
    r.k = k;
    r.n = n;
    r.bits = bits;
    r.codebook = codebook;
    r.matrix = matrix;
    r.out = d_wq.get();
    r.out_stride = n;
    GPU_CHECK_OK(Exl3ReconstructCuda(r, nullptr));
    Expect(d_wq.ToHost() == wq, "%s: decode", name.c_str());

    Exl3LinearCudaParams p;
    p.k = k;
    p.bits = bits;
    p.codebook = codebook;
    p.rows = m;
    p.x_type = exl3::kTypeF16;
    p.y_type = exl3::kTypeF32;
    p.matrices[0] = matrix;
    p.rounding_upstream = true;
    Workspace workspace(Exl3LinearWorkspaceBytes(p, device, 64) + 65536);
    GPU_CHECK_OK(Exl3LinearCuda(p, device, workspace.view(), nullptr));
    const Error e = Compare(d_y.ToHost(), std::vector<double>(y.begin(), y.end()));
    // The stored y starts from the exact xh, so an error this small means that ours has its bits.
    Expect(e.max < 2e-5 && e.rms < 3e-6, "%s: y max %.2e rms %.2e of rms", name.c_str(), e.max,
           e.rms);
    CheckRotated(name, p, xh, device, workspace);
  }
  Expect(cases == 28, "%d of 28 golden cases found in %s", cases, dir.c_str());
  std::printf("golden vectors: %d cases\n", cases);
}

void CheckDecode(bool quick) {
  for (int codebook = 0; codebook < 3; ++codebook) {
    const NaiveLinear naive(codebook);
    for (int bits = 1; bits <= 8; ++bits) {
      const RandomMatrix m(quick ? 256 : 5120, quick ? 128 : 1152, bits,
                           40 + static_cast<uint64_t>(bits), true);
      const DeviceArray<uint16_t> want = naive.Decode(m);
      DeviceArray<uint16_t> got(want.size());
      Exl3ReconstructCudaParams r;
      r.k = m.k;
      r.n = m.n;
      r.bits = bits;
      r.codebook = codebook;
      r.matrix = m.Bind(nullptr, 0, nullptr, 0);
      r.out = got.get();
      r.out_stride = m.n;
      GPU_CHECK_OK(Exl3ReconstructCuda(r, nullptr));
      Expect(got.ToHost() == want.ToHost(), "decode codebook %d K %d", codebook, bits);

      // Original basis: x W by hand for one row against the naive linear.
      r.original_basis = true;
      DeviceArray<float> w(want.size());
      r.out = w.get();
      r.out_type = exl3::kTypeF32;
      GPU_CHECK_OK(Exl3ReconstructCuda(r, nullptr));
      DeviceArray<float> x(static_cast<size_t>(m.k));
      Randomize(x.get(), x.size(), 9);
      const std::vector<double> ref = naive.Run(m, want, x.get(), m.k, 1, false).ToHost();
      const std::vector<float> hw = w.ToHost(), hx = x.ToHost();
      std::vector<float> y(static_cast<size_t>(m.n));
      for (int c = 0; c < m.n; ++c) {
        double sum = 0;
        for (int i = 0; i < m.k; ++i) {
          sum +=
              static_cast<double>(hx[static_cast<size_t>(i)]) *
              static_cast<double>(
                  hw[static_cast<size_t>(i) * static_cast<size_t>(m.n) + static_cast<size_t>(c)]);
        }
        y[static_cast<size_t>(c)] = static_cast<float>(sum);
      }
      const Error e = Compare(y, ref);
      Expect(e.rms < 1e-6, "original basis codebook %d K %d: rms %.2e", codebook, bits, e.rms);
    }
  }
  std::printf("decode: done\n");
}

// --- linear ---

struct LinearCase {
  int k, n, bits, codebook, num_matrices, x_type;
};

// False if the call has no such path.
bool RunLinear(const LinearCase& c,
               const std::vector<RandomMatrix>& matrices,
               const void* x,
               int first,
               int rows,
               float* y,
               const CudaDevice& device,
               const Workspace& workspace,
               cudaStream_t stream,
               LinearPath path = LinearPath::kAuto) {
  Exl3LinearCudaParams p;
  p.path = path;
  p.k = c.k;
  p.bits = c.bits;
  p.codebook = c.codebook;
  p.rows = rows;
  p.x_type = c.x_type;
  p.y_type = exl3::kTypeF32;
  p.num_matrices = c.num_matrices;
  const size_t x_bytes = c.x_type == exl3::kTypeF32 ? 4 : 2;
  for (int i = 0; i < c.num_matrices; ++i) {
    p.matrices[i] = matrices[static_cast<size_t>(i)].Bind(
        static_cast<const char*>(x) +
            static_cast<size_t>(first) * static_cast<size_t>(c.k) * x_bytes,
        c.k, y + i * c.n, static_cast<int64_t>(c.n) * c.num_matrices);
  }
  Exl3LinearPlan plan;
  if (path != LinearPath::kAuto && !PlanExl3Linear(p, device, &plan).ok()) return false;
  GPU_CHECK_OK(Exl3LinearCuda(p, device, workspace.view(), stream));
  return true;
}

// Calls that were compared, by LinearPath.
int64_t paths_run[kNumLinearPaths];

template <class T>
void CheckLinearCase(const LinearCase& c, int most, const CudaDevice& device, uint64_t seed) {
  std::vector<RandomMatrix> matrices;
  for (int i = 0; i < c.num_matrices; ++i) {
    matrices.emplace_back(c.k, c.n, c.bits, seed + 10 * static_cast<uint64_t>(i), true);
  }
  const size_t width = static_cast<size_t>(c.n) * static_cast<size_t>(c.num_matrices);
  DeviceArray<T> x(static_cast<size_t>(most) * static_cast<size_t>(c.k));
  Randomize(x.get(), x.size(), seed + 5);
  Exl3LinearCudaParams shape;
  shape.k = c.k;
  shape.bits = c.bits;
  shape.codebook = c.codebook;
  shape.rows = most;
  shape.num_matrices = c.num_matrices;
  for (int i = 0; i < c.num_matrices; ++i) {
    shape.matrices[i] = matrices[static_cast<size_t>(i)].Bind(x.get(), c.k, x.get(), c.n);
  }
  const Workspace workspace(Exl3LinearWorkspaceBytes(shape, device, most) + (size_t{8} << 20));
  DeviceArray<float> all(static_cast<size_t>(most) * width), part(all.size());
  GPU_CHECK(cudaMemset(all.get(), 0xff, all.size() * 4));
  RunLinear(c, matrices, x.get(), 0, most, all.get(), device, workspace, nullptr);
  const std::vector<float> want = all.ToHost();

  const NaiveLinear naive(c.codebook);
  const int checked = std::min(most, 40);
  Error rounded{}, exact{};
  for (int i = 0; i < c.num_matrices; ++i) {
    const RandomMatrix& m = matrices[static_cast<size_t>(i)];
    const DeviceArray<uint16_t> wq = naive.Decode(m);
    std::vector<float> mine(static_cast<size_t>(checked) * static_cast<size_t>(c.n));
    for (int r = 0; r < checked; ++r) {
      for (int j = 0; j < c.n; ++j) {
        mine[static_cast<size_t>(r) * static_cast<size_t>(c.n) + static_cast<size_t>(j)] =
            want[static_cast<size_t>(r) * width + static_cast<size_t>(i * c.n + j)];
      }
    }
    const Error a = Compare(mine, naive.Run(m, wq, x.get(), c.k, checked, true).ToHost());
    const Error b = Compare(mine, naive.Run(m, wq, x.get(), c.k, checked, false).ToHost());
    rounded.rms = std::max(rounded.rms, a.rms);
    rounded.max = std::max(rounded.max, a.max);
    exact.rms = std::max(exact.rms, b.rms);
  }
  // The tensor instructions' accumulators are cut, not rounded: the error grows along a chain.
  const double chain = c.k / Exl3Segments(c.k, c.n / 128 * c.num_matrices);
  Expect(rounded.rms < std::max(2e-6, 1.5e-9 * chain) && exact.rms < 3.5e-4,
         "linear %d x %d x%d K %d cb %d rows %d: rms %.2e (rounded input) %.2e (no rounding)", c.k,
         c.n, c.num_matrices, c.bits, c.codebook, most, rounded.rms, exact.rms);

  int64_t compared = 0, different = 0;
  auto compare = [&](int first, int rows, cudaStream_t stream, const Workspace& ws, float* out) {
    (void)stream;
    (void)ws;
    std::vector<float> got(static_cast<size_t>(rows) * width);
    GPU_CHECK(cudaDeviceSynchronize());
    GPU_CHECK(cudaMemcpy(got.data(), out, got.size() * 4, cudaMemcpyDeviceToHost));
    for (int r = 0; r < rows; ++r) {
      ++compared;
      different +=
          std::memcmp(got.data() + static_cast<size_t>(r) * width,
                      want.data() + static_cast<size_t>(first + r) * width, width * 4) != 0;
    }
  };
  for (int rows : {1, 2, 3, 6, 8, 9, 16, 17, 23, 25, 40, 48, 49, 64, 97, 100, 255, 1000}) {
    if (rows >= most) continue;
    const int first = (most - rows) * 3 / 4;
    for (int i = 0; i < kNumLinearPaths; ++i) {
      const LinearPath path = static_cast<LinearPath>(i);
      if (i != 0 && rows > 48) break;  // these have one path
      GPU_CHECK(cudaMemset(part.get(), 0xff, static_cast<size_t>(rows) * width * 4));
      if (!RunLinear(c, matrices, x.get(), first, rows, part.get(), device, workspace, nullptr,
                     path)) {
        continue;
      }
      ++paths_run[i];
      compare(first, rows, nullptr, workspace, part.get());
    }
    // Blocks that take many tasks, one after the other.
    CudaDevice narrow = device;
    narrow.num_sms = 2;
    for (LinearPath path :
         {LinearPath::kTasks, LinearPath::kTasksOfTwo, LinearPath::kTasksWarpgroup}) {
      if (rows > 48) break;
      GPU_CHECK(cudaMemset(part.get(), 0xff, static_cast<size_t>(rows) * width * 4));
      if (RunLinear(c, matrices, x.get(), first, rows, part.get(), narrow, workspace, nullptr,
                    path)) {
        compare(first, rows, nullptr, workspace, part.get());
      }
    }
  }
  // A graph, replayed twice, and a second stream with its own workspace at the same time.
  const int rows = std::min(most, 6);
  cudaStream_t streams[2];
  for (auto& s : streams)
    GPU_CHECK(cudaStreamCreate(&s));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  GPU_CHECK(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < 3; ++i)
    RunLinear(c, matrices, x.get(), 0, rows, part.get(), device, workspace, streams[0]);
  GPU_CHECK(cudaStreamEndCapture(streams[0], &graph));
  GPU_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  const Workspace second(Exl3LinearWorkspaceBytes(shape, device, most) + (size_t{8} << 20));
  float* other = part.get() + static_cast<size_t>(rows) * width;
  GPU_CHECK(cudaMemset(part.get(), 0xff, static_cast<size_t>(rows) * width * 4));
  GPU_CHECK(cudaDeviceSynchronize());
  for (int i = 0; i < 4; ++i) {
    GPU_CHECK(cudaGraphLaunch(exec, streams[0]));
    if (most >= 2 * rows) {
      for (int j = 0; j < 3; ++j)
        RunLinear(c, matrices, x.get(), 0, rows, other, device, second, streams[1]);
    }
  }
  compare(0, rows, streams[0], workspace, part.get());
  if (most >= 2 * rows) compare(0, rows, streams[1], second, other);
  GPU_CHECK(cudaGraphExecDestroy(exec));
  GPU_CHECK(cudaGraphDestroy(graph));
  for (auto& s : streams)
    GPU_CHECK(cudaStreamDestroy(s));
  Expect(different == 0, "linear %d x %d x%d K %d cb %d: %lld of %lld rows changed bits", c.k, c.n,
         c.num_matrices, c.bits, c.codebook, static_cast<long long>(different),
         static_cast<long long>(compared));
  Expect(workspace.CountersClean() && second.CountersClean(), "linear: counters are zero again");
}

void CheckLinear(bool quick, size_t from, size_t count, uint64_t seed, const CudaDevice& device) {
  Random random{seed};
  // First what random shapes do not meet: more outputs than clusters fit, several matrices,
  // clusters of more than 8 blocks, shared rotation.
  std::vector<std::pair<LinearCase, int>> cases = {
      {{512, 128 * 270, 3, 2, 1, exl3::kTypeBf16}, 49},
      {{768, 128 * 68, 2, 2, 4, exl3::kTypeF16}, 49},
  };
  if (!quick) {
    cases.push_back({{1280, 16384, 5, 2, 1, exl3::kTypeF16}, 49});
    cases.push_back({{5120, 64640, 6, 2, 1, exl3::kTypeBf16}, 49});
    cases.push_back({{6144, 12800, 5, 2, 1, exl3::kTypeBf16}, 49});
    cases.push_back({{5120, 1280, 4, 2, 1, exl3::kTypeBf16}, 1000});
    cases.push_back({{5120, 2304, 4, 2, 1, exl3::kTypeF16}, 100});
  }
  const int num_cases = quick ? 8 : 40;
  for (int i = 0; i < num_cases; ++i) {
    LinearCase c{};
    c.k = 128 * (1 + random.Below(quick ? 5 : 44));
    c.n = 128 * (1 + random.Below(quick ? 4 : 20));
    c.bits = 1 + i % 8;
    c.codebook = i % 4 == 3 ? random.Below(2) : 2;
    c.num_matrices = i % 3 == 0 ? 1 + random.Below(4) : 1;
    c.x_type = i % 3;
    const int counts[] = {1, 5, 48, 64, 100, 255, 1000, 4096};
    cases.emplace_back(c, quick ? counts[i % 5] : counts[(i * 5 + 3) % 8]);
  }
  const size_t end = count > 0 ? std::min(from + count, cases.size()) : cases.size();
  for (size_t i = from; i < end; ++i) {
    const auto& [c, most] = cases[i];
    if (c.x_type == exl3::kTypeF32) {
      CheckLinearCase<float>(c, most, device, seed + 100 * static_cast<uint64_t>(i));
    } else if (c.x_type == exl3::kTypeBf16) {
      CheckLinearCase<__nv_bfloat16>(c, most, device, seed + 100 * static_cast<uint64_t>(i));
    } else {
      CheckLinearCase<__half>(c, most, device, seed + 100 * static_cast<uint64_t>(i));
    }
  }
  std::printf("linear: %zu cases; calls by path:", end - std::min(from, end));
  for (int i = 0; i < kNumLinearPaths; ++i) {
    const bool warpgroup = i == static_cast<int>(LinearPath::kTasksWarpgroup);
    std::printf("  %d: %lld", i, static_cast<long long>(paths_run[i]));
    Expect(paths_run[i] > 0 || count > 0 || end <= from ||
               (warpgroup && device.compute_capability != 90) || device.cluster_places[0][2] == 0,
           "linear: path %d was never run", i);
  }
  std::printf("\n");
}

// --- mixture of experts ---

struct MoeCase {
  int d, inner, num_experts, num_chosen, gate_up_bits, down_bits, codebook;
};

enum class Routing { kUniform, kSkewed, kSame };

std::vector<int32_t> MakeIds(const MoeCase& c, int rows, Routing routing, Random& random) {
  std::vector<int32_t> ids;
  for (int r = 0; r < rows; ++r) {
    std::vector<int32_t> row;
    while (static_cast<int>(row.size()) < c.num_chosen) {
      int id = random.Below(c.num_experts);
      if (routing == Routing::kSkewed) id = std::min(id, random.Below(c.num_experts));
      if (routing == Routing::kSkewed) id = std::min(id, random.Below(c.num_experts));
      if (routing == Routing::kSame)
        id = static_cast<int>(row.size()) * (c.num_experts / c.num_chosen);
      if (std::find(row.begin(), row.end(), id) == row.end()) row.push_back(id);
    }
    ids.insert(ids.end(), row.begin(), row.end());
  }
  return ids;
}

void CheckMoeCase(
    const MoeCase& c, int most, Routing routing, const CudaDevice& device, uint64_t seed) {
  Random random{seed};
  std::vector<RandomMatrix> gate, up, down;
  std::vector<exl3::MoeExpert> experts;
  for (int e = 0; e < c.num_experts; ++e) {
    const uint64_t s = seed + 1000 * static_cast<uint64_t>(e);
    gate.emplace_back(c.d, c.inner, c.gate_up_bits, s, true);
    up.emplace_back(c.d, c.inner, c.gate_up_bits, s + 100, true);
    down.emplace_back(c.inner, c.d, c.down_bits, s + 200, true);
    exl3::MoeExpert x{};
    x.gate = gate.back().trellis.get();
    x.up = up.back().trellis.get();
    x.down = down.back().trellis.get();
    x.gate_suh = gate.back().suh.get();
    x.gate_svh = gate.back().svh.get();
    x.up_suh = up.back().suh.get();
    x.up_svh = up.back().svh.get();
    x.down_suh = down.back().suh.get();
    x.down_svh = down.back().svh.get();
    experts.push_back(x);
  }
  const DeviceArray<exl3::MoeExpert> table(experts);
  const std::vector<int32_t> ids = MakeIds(c, most, routing, random);
  std::vector<float> weights(ids.size());
  for (float& w : weights)
    w = 0.05f + static_cast<float>(random.Below(1000)) / 1500.0f;
  const DeviceArray<int32_t> d_ids(ids);
  const DeviceArray<float> d_weights(weights);
  const size_t d = static_cast<size_t>(c.d);
  DeviceArray<__nv_bfloat16> x(static_cast<size_t>(most) * d);
  Randomize(x.get(), x.size(), seed + 7);
  DeviceArray<float> shared(static_cast<size_t>(most) * d), all(shared.size()), part(shared.size());
  Randomize(shared.get(), shared.size(), seed + 8);

  MoeCudaParams p;
  p.rows = most;
  p.d = c.d;
  p.inner = c.inner;
  p.num_experts = c.num_experts;
  p.num_chosen = c.num_chosen;
  p.gate_up_bits = c.gate_up_bits;
  p.down_bits = c.down_bits;
  p.codebook = c.codebook;
  p.limit = 10;
  p.round_gate_up = p.round_activation = false;
  p.experts = table.get();
  p.x_stride = p.shared_stride = p.out_stride = c.d;
  const Workspace workspace(MoeCudaWorkspaceBytes(p, most));
  auto run = [&](int first, int rows, float* out, const Workspace& ws, cudaStream_t stream,
                 MoePath path = MoePath::kAuto) {
    MoeCudaParams q = p;
    q.rows = rows;
    q.path = path;
    q.ids = d_ids.get() + first * c.num_chosen;
    q.weights = d_weights.get() + first * c.num_chosen;
    q.x = x.get() + static_cast<size_t>(first) * d;
    q.shared_out = shared.get() + static_cast<size_t>(first) * d;
    q.out = out;
    GPU_CHECK_OK(MoeCuda(q, device, ws.view(), stream));
  };
  GPU_CHECK(cudaMemset(all.get(), 0xff, all.size() * 4));
  run(0, most, all.get(), workspace, nullptr);
  const std::vector<float> want = all.ToHost();

  // Float64 with no rounding, for some rows.
  const NaiveLinear naive(c.codebook);
  std::vector<float> mine;
  std::vector<double> ref;
  const std::vector<float> h_shared = shared.ToHost();
  for (int i = 0; i < std::min(most, 4); ++i) {
    const int row = i * (most - 1) / std::max(1, std::min(most, 4) - 1);
    std::vector<double> sum(d);
    for (int j = 0; j < c.num_chosen; ++j) {
      const size_t slot = static_cast<size_t>(row * c.num_chosen + j);
      const size_t e = static_cast<size_t>(ids[slot]);
      const __nv_bfloat16* xr = x.get() + static_cast<size_t>(row) * d;
      const auto g = naive.Run(gate[e], naive.Decode(gate[e]), xr, c.d, 1, false).ToHost();
      const auto u = naive.Run(up[e], naive.Decode(up[e]), xr, c.d, 1, false).ToHost();
      std::vector<float> a(g.size());
      for (size_t v = 0; v < a.size(); ++v) {
        const double gc = std::min(g[v], 10.0), uc = std::clamp(u[v], -10.0, 10.0);
        a[v] = static_cast<float>(gc / (1 + std::exp(-gc)) * uc);
      }
      const DeviceArray<float> d_a(a);
      const auto o =
          naive.Run(down[e], naive.Decode(down[e]), d_a.get(), c.inner, 1, false).ToHost();
      for (size_t v = 0; v < d; ++v)
        sum[v] += static_cast<double>(weights[slot]) * o[v];
    }
    for (size_t v = 0; v < d; ++v) {
      // Without the shared part, so that the error is relative to the experts.
      const size_t at = static_cast<size_t>(row) * d + v;
      ref.push_back(sum[v]);
      mine.push_back(
          static_cast<float>(static_cast<double>(want[at]) - static_cast<double>(h_shared[at])));
    }
  }
  const Error e = Compare(mine, ref);
  Expect(e.rms < 9e-4,
         "moe d %d inner %d E %d top %d K %d/%d cb %d rows %d routing %d: rms %.2e max %.2e", c.d,
         c.inner, c.num_experts, c.num_chosen, c.gate_up_bits, c.down_bits, c.codebook, most,
         static_cast<int>(routing), e.rms, e.max);

  int64_t compared = 0, different = 0;
  auto compare = [&](int first, int rows, const float* out) {
    std::vector<float> got(static_cast<size_t>(rows) * d);
    GPU_CHECK(cudaDeviceSynchronize());
    GPU_CHECK(cudaMemcpy(got.data(), out, got.size() * 4, cudaMemcpyDeviceToHost));
    for (int r = 0; r < rows; ++r) {
      ++compared;
      different += std::memcmp(got.data() + static_cast<size_t>(r) * d,
                               want.data() + static_cast<size_t>(first + r) * d, d * 4) != 0;
    }
  };
  for (int rows : {1, 2, 5, 6, 8, 9, 17, 48, 49, 64, 100, 255, 1000}) {
    if (rows >= most) continue;
    const int first = (most - rows) * 2 / 3;
    GPU_CHECK(cudaMemset(part.get(), 0xff, static_cast<size_t>(rows) * d * 4));
    run(first, rows, part.get(), workspace, nullptr);
    compare(first, rows, part.get());
  }
  for (MoePath path : {MoePath::kFragments, MoePath::kWarpgroups}) {  // all rows, either product
    GPU_CHECK(cudaMemset(part.get(), 0xff, part.size() * 4));
    run(0, most, part.get(), workspace, nullptr, path);
    compare(0, most, part.get());
  }
  {  // a workspace too small for the call: slices
    const Workspace small(MoeCudaWorkspaceBytes(p, std::max(1, most / 3)));
    GPU_CHECK(cudaMemset(part.get(), 0xff, part.size() * 4));
    run(0, most, part.get(), small, nullptr);
    compare(0, most, part.get());
    Expect(small.CountersClean(), "moe: counters of the small workspace are zero again");
  }
  cudaStream_t streams[2];
  for (auto& s : streams)
    GPU_CHECK(cudaStreamCreate(&s));
  const int rows = std::min(most, 5);
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  GPU_CHECK(cudaStreamBeginCapture(streams[0], cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < 3; ++i)
    run(0, rows, part.get(), workspace, streams[0]);
  GPU_CHECK(cudaStreamEndCapture(streams[0], &graph));
  GPU_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  const Workspace second(MoeCudaWorkspaceBytes(p, most));
  float* other = part.get() + static_cast<size_t>(rows) * d;
  GPU_CHECK(cudaMemset(part.get(), 0xff, part.size() * 4));
  GPU_CHECK(cudaDeviceSynchronize());
  for (int i = 0; i < 3; ++i) {
    GPU_CHECK(cudaGraphLaunch(exec, streams[0]));
    if (most >= 2 * rows) run(0, rows, other, second, streams[1]);
  }
  compare(0, rows, part.get());
  if (most >= 2 * rows) compare(0, rows, other);
  GPU_CHECK(cudaGraphExecDestroy(exec));
  GPU_CHECK(cudaGraphDestroy(graph));
  for (auto& s : streams)
    GPU_CHECK(cudaStreamDestroy(s));
  Expect(different == 0, "moe rows %d routing %d: %lld of %lld rows changed bits", most,
         static_cast<int>(routing), static_cast<long long>(different),
         static_cast<long long>(compared));
  Expect(workspace.CountersClean() && second.CountersClean(), "moe: counters are zero again");
}

void CheckMoe(bool quick, uint64_t seed, const CudaDevice& device) {
  struct Run {
    MoeCase c;
    int most;
    Routing routing;
  };
  std::vector<Run> runs = {
      {{256, 128, 8, 3, 2, 3, 2}, 70, Routing::kUniform},
      {{512, 256, 8, 2, 3, 2, 2}, 9, Routing::kSame},
      {{256, 384, 5, 4, 4, 5, 1}, 60, Routing::kSkewed},
  };
  if (!quick) {
    runs.insert(runs.end(), {
                                {{5120, 1152, 16, 6, 3, 3, 2}, 1, Routing::kUniform},
                                {{5120, 1152, 16, 6, 3, 3, 2}, 48, Routing::kUniform},
                                {{5120, 1152, 16, 6, 3, 3, 2}, 4096, Routing::kSkewed},
                                {{5120, 1152, 12, 6, 2, 2, 2}, 1024, Routing::kSame},
                                {{5120, 1152, 64, 6, 3, 3, 2}, 2000, Routing::kUniform},
                                {{1024, 2944, 40, 8, 5, 4, 2}, 300, Routing::kSkewed},
                                {{2048, 640, 20, 6, 1, 8, 2}, 130, Routing::kUniform},
                                {{2048, 640, 20, 6, 6, 7, 0}, 48, Routing::kSkewed},
                            });
  }
  for (size_t i = 0; i < runs.size(); ++i)
    CheckMoeCase(runs[i].c, runs[i].most, runs[i].routing, device, seed + i);
  std::printf("experts: %zu cases\n", runs.size());
}

// Refusals, with their texts.
void CheckRefusals(const CudaDevice& device) {
  const RandomMatrix m(256, 128, 3, 1, true);
  DeviceArray<float> x(4 * 256), y(4 * 128);
  Exl3LinearCudaParams p;
  p.k = 256;
  p.bits = 3;
  p.rows = 4;
  p.x_type = p.y_type = exl3::kTypeF32;
  p.matrices[0] = m.Bind(x.get(), 256, y.get(), 128);
  Workspace workspace(kCudaCounterBytes);
  auto refused = [&](Exl3LinearCudaParams q, const char* what) {
    const CudaStatus s = Exl3LinearCuda(q, device, workspace.view(), nullptr);
    Expect(s.code < 0, "refused: %s: %s", what, s.text);
  };
  Exl3LinearCudaParams q = p;
  q.rows = 100;
  refused(q, "workspace without room for rotated inputs of 100 rows");
  q = p;
  q.k = 200;
  refused(q, "k");
  q = p;
  q.bits = 9;
  refused(q, "K");
  q = p;
  q.rows = 0;
  refused(q, "rows");
  q = p;
  q.matrices[0].x_cols = 300;
  refused(q, "input columns");
  GPU_CHECK(cudaDeviceSynchronize());
}

// One form of the ring, so that racecheck's verdict is about that form.
int CheckRing(const std::string& form) {
  constexpr int kBlocks = 4, kSteps = 12;
  const int wrong = form == "lane-zero"    ? RunRing<RingForm::kLaneZero>(kBlocks, kSteps)
                    : form == "stores"     ? RunRing<RingForm::kStores>(kBlocks, kSteps)
                    : form == "every-lane" ? RunRing<RingForm::kEveryLane>(kBlocks, kSteps)
                    : form == "too-early"  ? RunRing<RingForm::kTooEarly>(kBlocks, kSteps)
                                           : -1;
  std::printf("ring %s: %d lanes wrong\n", form.c_str(), wrong);
  return wrong == 0 || (wrong > 0 && form == "too-early") ? 0 : 1;
}

int Main(int argc, char** argv) {
  if (const char* form = Option(argc, argv, "ring")) return CheckRing(form);
  const bool quick = Flag(argc, argv, "quick");
  const char* seed_text = Option(argc, argv, "seed");
  const uint64_t seed = seed_text != nullptr ? std::strtoull(seed_text, nullptr, 10) : 20261201;
  const CudaDevice device = ThisDevice();
  std::printf("device_check: seed %llu, %d SMs\n", static_cast<unsigned long long>(seed),
              device.num_sms);
  CheckCodebooks();
  if (const char* dir = Option(argc, argv, "vectors")) CheckVectors(dir, device);
  CheckRefusals(device);
  CheckDecode(quick);
  auto number = [&](const char* name) {
    const char* text = Option(argc, argv, name);
    return text != nullptr ? static_cast<size_t>(std::atoi(text)) : size_t{0};
  };
  CheckLinear(quick, number("from"), number("linear"), seed, device);
  if (number("linear") == 0) CheckMoe(quick, seed, device);
  std::printf("device_check: %d failures\n", failures);
  return failures == 0 ? 0 : 1;
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::Main(argc, argv);
}
