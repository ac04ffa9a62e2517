// What the GPU check and benchmark programs share: device buffers, random fills, a naive reference
// of the EXL3 linear in double that uses none of the kernels' code, graph timing, and one line of
// JSON per result. These programs are built with the CUDA compiler alone, so they run on a machine
// that has nothing else. Include in one translation unit per program.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "kernels/cuda/workspace_cuda.h"
#include "kernels/exl3/exl3_gemm_cuda.h"
#include "kernels/exl3/exl3_linear_cuda.h"

namespace twinspark::gpu_test {

inline void Check(cudaError_t error, const char* what, int line) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "line %d: %s: %s\n", line, what, cudaGetErrorString(error));
  std::exit(2);
}
#define GPU_CHECK(call) ::twinspark::gpu_test::Check((call), #call, __LINE__)

inline void CheckOk(const CudaStatus& status, int line) {
  if (status.ok()) return;
  std::fprintf(stderr, "line %d: %s (code %d)\n", line, status.text, status.code);
  std::exit(2);
}
#define GPU_CHECK_OK(call) ::twinspark::gpu_test::CheckOk((call), __LINE__)

template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(size_t count) : count_(count) {
    GPU_CHECK(cudaMalloc(&data_, std::max<size_t>(count, 1) * sizeof(T)));
  }
  explicit DeviceArray(const std::vector<T>& host) : DeviceArray(host.size()) {
    GPU_CHECK(cudaMemcpy(data_, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceArray(DeviceArray&& other) noexcept { *this = std::move(other); }
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }
  T* get() const { return data_; }
  size_t size() const { return count_; }
  std::vector<T> ToHost() const {
    std::vector<T> host(count_);
    GPU_CHECK(cudaDeviceSynchronize());
    GPU_CHECK(cudaMemcpy(host.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost));
    return host;
  }

 private:
  T* data_ = nullptr;
  size_t count_ = 0;
};

inline CudaDevice ThisDevice() {
  cudaDeviceProp prop{};
  GPU_CHECK(cudaGetDeviceProperties(&prop, 0));
  CudaDevice d;
  d.num_sms = prop.multiProcessorCount;
  d.shared_bytes_per_sm = prop.sharedMemPerMultiprocessor;
  d.shared_bytes_per_block = prop.sharedMemPerBlockOptin;
  d.compute_capability = 10 * prop.major + prop.minor;
  Exl3ClusterPlaces(&d);
  return d;
}

class Workspace {
 public:
  explicit Workspace(size_t bytes) : memory_(bytes) {
    GPU_CHECK(cudaMemset(memory_.get(), 0, kCudaCounterBytes));
    // Poison: nothing may rely on clean scratch.
    if (bytes > kCudaCounterBytes) {
      GPU_CHECK(cudaMemset(memory_.get() + kCudaCounterBytes, 0xff, bytes - kCudaCounterBytes));
    }
  }
  CudaWorkspace view() const { return {memory_.get(), memory_.size()}; }
  // Whether every counter is zero again.
  bool CountersClean() const {
    std::vector<uint32_t> c(kCudaCounterBytes / 4);
    GPU_CHECK(cudaDeviceSynchronize());
    GPU_CHECK(cudaMemcpy(c.data(), memory_.get(), kCudaCounterBytes, cudaMemcpyDeviceToHost));
    return std::all_of(c.begin(), c.end(), [](uint32_t v) { return v == 0; });
  }

 private:
  DeviceArray<uint8_t> memory_;
};

// --- random data ---

__device__ inline uint64_t Mix(uint64_t x) {
  x += 0x9E3779B97F4A7C15ull;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

__global__ void FillBits(uint32_t* out, size_t count, uint64_t seed) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    out[i] = static_cast<uint32_t>(Mix(seed * 0x100000001B3ull + i));
  }
}

__device__ inline float Normal(uint64_t bits) {
  const float u = (static_cast<float>(bits & 0xffffff) + 0.5f) / 16777216.0f;
  const float v = static_cast<float>((bits >> 24) & 0xffffff) / 16777216.0f;
  return sqrtf(-2.0f * logf(u)) * cospif(2.0f * v);
}

// signs: values of random sign and size 0.5 .. 1.5; else standard normal.
template <class T>
__global__ void FillReal(T* out, size_t count, uint64_t seed, bool signs, float scale) {
  for (size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x; i < count;
       i += static_cast<size_t>(gridDim.x) * blockDim.x) {
    const uint64_t bits = Mix(seed * 0x100000001B3ull + i);
    float v = Normal(bits);
    if (signs) {
      v = (0.5f + static_cast<float>((bits >> 20) & 0xfffff) / 1048576.0f) *
          ((bits & 1) ? 1.0f : -1.0f);
    }
    out[i] = static_cast<T>(v * scale);
  }
}

template <class T>
void Randomize(T* out, size_t count, uint64_t seed, bool signs = false, float scale = 1.0f) {
  FillReal<<<1024, 256>>>(out, count, seed, signs, scale);
}

// A matrix of random bits in device memory; `stored` (the order of a checkpoint) only if asked.
struct RandomMatrix {
  int k, n, bits;
  DeviceArray<uint8_t> stored, trellis;
  DeviceArray<__half> suh, svh;
  RandomMatrix(int k_in, int n_in, int bits_in, uint64_t seed, bool keep_stored)
      : k(k_in),
        n(n_in),
        bits(bits_in),
        trellis(static_cast<size_t>(k_in) * n_in / 8 * bits_in),
        suh(k_in),
        svh(n_in) {
    if (keep_stored) stored = DeviceArray<uint8_t>(trellis.size());
    uint8_t* filled = keep_stored ? stored.get() : trellis.get();
    FillBits<<<1024, 256>>>(reinterpret_cast<uint32_t*>(filled), trellis.size() / 4, seed);
    if (keep_stored) {
      GPU_CHECK_OK(Exl3PrepareCuda(stored.get(), n, 0, k, n, bits, trellis.get(), nullptr));
    }
    Randomize(suh.get(), suh.size(), seed + 1, true, 0.02f);
    Randomize(svh.get(), svh.size(), seed + 2, true);
  }
  exl3::GemmMatrix Bind(const void* x, int64_t x_stride, void* y, int64_t y_stride) const {
    exl3::GemmMatrix m{};
    m.trellis = trellis.get();
    m.suh = suh.get();
    m.svh = svh.get();
    m.x = x;
    m.y = y;
    m.x_stride = x_stride;
    m.y_stride = y_stride;
    m.x_cols = k;
    m.y_cols = n;
    m.num_blocks = n / 128;
    return m;
  }
};

// --- naive reference, from the text of the specification ---

// Value of a state; section 2, on the host.
inline uint16_t HalfBitsOf(double v) {
  return __half_as_ushort(__double2half(v));
}
inline double HalfValue(uint16_t bits) {
  return static_cast<double>(__half2float(__ushort_as_half(bits)));
}
inline uint16_t CodebookValue(int codebook, uint32_t s) {
  if (codebook == 2) {
    const uint32_t x = s * 0x83DCD12Du;
    const uint32_t sum = (x & 255) + ((x >> 8) & 255) + ((x >> 16) & 255) + (x >> 24);
    return HalfBitsOf((1774.0 * sum - 905216.0) / 262144.0);
  }
  uint32_t x = codebook == 1 ? s * 0xCBAC1FEDu : s * 89226354u + 64248484u;
  x = (x & 0x8FFF8FFFu) ^ 0x3B603B60u;
  const double sum =
      HalfValue(static_cast<uint16_t>(x)) + HalfValue(static_cast<uint16_t>(x >> 16));
  return sum == 0 ? 0 : HalfBitsOf(sum);
}

inline std::vector<uint16_t> CodebookTable(int codebook) {
  std::vector<uint16_t> table(65536);
  for (uint32_t s = 0; s < 65536; ++s)
    table[s] = CodebookValue(codebook, s);
  return table;
}

__global__ void NaiveDecode(
    const uint16_t* trellis, const uint16_t* table, int k, int n, int bits, uint16_t* wq) {
  const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  if (i >= static_cast<size_t>(k) * n) return;
  const int row = static_cast<int>(i / n), col = static_cast<int>(i % n);
  const int r = row % 16, c = col % 16;
  const int p = 32 * (c & 7) + 8 * ((r & 7) >> 1) + 4 * (c >> 3) + 2 * (r >> 3) + (r & 1);
  const uint16_t* tile =
      trellis + (static_cast<size_t>(row / 16) * (n / 16) + col / 16) * 16 * bits;
  uint32_t state = 0;
  for (int b = 0; b < 16; ++b) {
    const int j = ((p + 1) * bits - 16 + b + 256 * bits) % (256 * bits);
    const uint16_t word = tile[(j / 16) ^ 1];
    state = state << 1 | ((word >> (15 - j % 16)) & 1);
  }
  wq[i] = table[state];
}

// xh without any rounding, as a sum over the matrix H.
template <class T>
__global__ void NaiveRotate(
    const T* x, int64_t stride, const __half* suh, int k, int rows, double* xh) {
  const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  if (i >= static_cast<size_t>(rows) * k) return;
  const int row = static_cast<int>(i / k), col = static_cast<int>(i % k), base = col / 128 * 128;
  double sum = 0;
  for (int j = 0; j < 128; ++j) {
    const double v = static_cast<double>(static_cast<float>(x[row * stride + base + j])) *
                     static_cast<double>(__half2float(suh[base + j]));
    sum += (__popc((col & 127) & j) & 1) ? -v : v;
  }
  xh[i] = sum / sqrt(128.0);
}

// xh with the bits of the specification: f32 butterflies of stride 1, 2, .. 64, then one rounding
// to f16. One thread per row and 128 channels.
template <class T>
__global__ void NaiveRotateRounded(
    const T* x, int64_t stride, const __half* suh, int k, int rows, double* xh) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= rows * (k / 128)) return;
  const int row = i / (k / 128), base = i % (k / 128) * 128;
  float v[128];
  for (int j = 0; j < 128; ++j) {
    v[j] = static_cast<float>(x[row * stride + base + j]) * __half2float(suh[base + j]);
  }
  for (int h = 1; h < 128; h *= 2) {
    for (int j = 0; j < 128; ++j) {
      if ((j & h) != 0) continue;
      const float a = v[j], b = v[j + h];
      v[j] = a + b;
      v[j + h] = a - b;
    }
  }
  for (int j = 0; j < 128; ++j) {
    xh[static_cast<size_t>(row) * k + base + j] =
        static_cast<double>(__half2float(__float2half_rn(v[j] * 0.08838834764f)));
  }
}

__global__ void NaiveProduct(
    const double* xh, const uint16_t* wq, int k, int n, int rows, double* z) {
  const int col = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  const int row = static_cast<int>(blockIdx.y);
  if (col >= n) return;
  double sum = 0;
  for (int i = 0; i < k; ++i) {
    sum +=
        xh[static_cast<size_t>(row) * k + i] *
        static_cast<double>(__half2float(__ushort_as_half(wq[static_cast<size_t>(i) * n + col])));
  }
  z[static_cast<size_t>(row) * n + col] = sum;
}

__global__ void NaiveOutput(const double* z, const __half* svh, int n, int rows, double* y) {
  const size_t i = blockIdx.x * static_cast<size_t>(blockDim.x) + threadIdx.x;
  if (i >= static_cast<size_t>(rows) * n) return;
  const int col = static_cast<int>(i % n), base = col / 128 * 128;
  double sum = 0;
  for (int j = 0; j < 128; ++j) {
    const double v = z[i - col + base + j];
    sum += (__popc((col & 127) & j) & 1) ? -v : v;
  }
  y[i] = sum / sqrt(128.0) * static_cast<double>(__half2float(svh[col]));
}

class NaiveLinear {
 public:
  explicit NaiveLinear(int codebook) : table_(CodebookTable(codebook)) {}

  DeviceArray<uint16_t> Decode(const RandomMatrix& m) const {
    DeviceArray<uint16_t> wq(static_cast<size_t>(m.k) * m.n);
    NaiveDecode<<<static_cast<unsigned>((wq.size() + 255) / 256), 256>>>(
        reinterpret_cast<const uint16_t*>(m.stored.get()), table_.get(), m.k, m.n, m.bits,
        wq.get());
    GPU_CHECK(cudaGetLastError());
    return wq;
  }

  // y in double on the device, [rows, n].
  template <class T>
  DeviceArray<double> Run(const RandomMatrix& m,
                          const DeviceArray<uint16_t>& wq,
                          const T* x,
                          int64_t stride,
                          int rows,
                          bool round) const {
    DeviceArray<double> xh(static_cast<size_t>(rows) * m.k), z(static_cast<size_t>(rows) * m.n),
        y(static_cast<size_t>(rows) * m.n);
    if (round) {
      NaiveRotateRounded<<<static_cast<unsigned>(rows * (m.k / 128) + 63) / 64, 64>>>(
          x, stride, m.suh.get(), m.k, rows, xh.get());
    } else {
      NaiveRotate<<<static_cast<unsigned>((xh.size() + 255) / 256), 256>>>(x, stride, m.suh.get(),
                                                                           m.k, rows, xh.get());
    }
    NaiveProduct<<<dim3(static_cast<unsigned>(m.n / 128), static_cast<unsigned>(rows)), 128>>>(
        xh.get(), wq.get(), m.k, m.n, rows, z.get());
    NaiveOutput<<<static_cast<unsigned>((y.size() + 255) / 256), 256>>>(z.get(), m.svh.get(), m.n,
                                                                        rows, y.get());
    GPU_CHECK(cudaGetLastError());
    GPU_CHECK(cudaDeviceSynchronize());
    return y;
  }

 private:
  DeviceArray<uint16_t> table_;
};

struct Error {
  double rms = 0;  // over the rms of the reference
  double max = 0;
};
inline Error Compare(const std::vector<float>& y, const std::vector<double>& ref) {
  double square = 0, error = 0, largest = 0;
  for (size_t i = 0; i < ref.size(); ++i) {
    const double d = static_cast<double>(y[i]) - ref[i];
    if (!(std::abs(d) <= 1e300)) return {1e9, 1e9};  // NaN or infinite
    square += ref[i] * ref[i];
    error += d * d;
    largest = std::max(largest, std::abs(d));
  }
  const double rms = std::sqrt(square / static_cast<double>(ref.size())) + 1e-300;
  return {std::sqrt(error / static_cast<double>(ref.size())) / rms, largest / rms};
}

// --- timing ---

// Median time of one call in us: a graph of `calls` calls (call i gets i), replayed.
inline double TimeGraph(int calls,
                        int replays,
                        const std::function<void(int, cudaStream_t)>& call) {
  cudaStream_t stream;
  GPU_CHECK(cudaStreamCreate(&stream));
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  GPU_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
  for (int i = 0; i < calls; ++i)
    call(i, stream);
  GPU_CHECK(cudaStreamEndCapture(stream, &graph));
  GPU_CHECK(cudaGraphInstantiate(&exec, graph, 0));
  std::vector<cudaEvent_t> events(static_cast<size_t>(replays) + 1);
  for (auto& e : events)
    GPU_CHECK(cudaEventCreate(&e));
  for (int i = 0; i < 2; ++i)
    GPU_CHECK(cudaGraphLaunch(exec, stream));
  GPU_CHECK(cudaEventRecord(events[0], stream));
  for (int i = 0; i < replays; ++i) {
    GPU_CHECK(cudaGraphLaunch(exec, stream));
    GPU_CHECK(cudaEventRecord(events[static_cast<size_t>(i) + 1], stream));
  }
  GPU_CHECK(cudaStreamSynchronize(stream));
  std::vector<double> us;
  for (int i = 0; i < replays; ++i) {
    float ms = 0;
    GPU_CHECK(cudaEventElapsedTime(&ms, events[static_cast<size_t>(i)],
                                   events[static_cast<size_t>(i) + 1]));
    us.push_back(1000.0 * static_cast<double>(ms) / calls);
  }
  for (auto& e : events)
    GPU_CHECK(cudaEventDestroy(e));
  GPU_CHECK(cudaGraphExecDestroy(exec));
  GPU_CHECK(cudaGraphDestroy(graph));
  GPU_CHECK(cudaStreamDestroy(stream));
  std::sort(us.begin(), us.end());
  return us[us.size() / 2];
}

// --- output ---

class JsonLines {
 public:
  explicit JsonLines(const char* path) : file_(path != nullptr ? std::fopen(path, "w") : nullptr) {}
  ~JsonLines() {
    if (file_ != nullptr) std::fclose(file_);
  }
  void Write(const char* format, ...) const {
    if (file_ == nullptr) return;
    va_list args;
    va_start(args, format);
    std::vfprintf(file_, format, args);
    va_end(args);
    std::fputc('\n', file_);
    std::fflush(file_);
  }

 private:
  FILE* file_;
};

// Value of --name=value, or null.
inline const char* Option(int argc, char** argv, const char* name) {
  const std::string prefix = std::string("--") + name + "=";
  for (int i = 1; i < argc; ++i) {
    if (std::strncmp(argv[i], prefix.c_str(), prefix.size()) == 0) return argv[i] + prefix.size();
  }
  return nullptr;
}
inline bool Flag(int argc, char** argv, const char* name) {
  const std::string flag = std::string("--") + name;
  for (int i = 1; i < argc; ++i) {
    if (flag == argv[i]) return true;
  }
  return false;
}

}  // namespace twinspark::gpu_test
