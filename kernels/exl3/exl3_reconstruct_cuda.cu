// EXL3 matrices back to f16 or bf16, in the rotated basis (exact) or the original one. One block
// per 128 x 128 weights: eight warps decode 64 tiles into shared memory, rotate there if asked, and
// write whole rows.
#include <cuda_runtime.h>

#include "kernels/cuda/launch_cuda.cuh"
#include "kernels/device/ptx.cuh"
#include "kernels/exl3/exl3_decode_cuda.cuh"
#include "kernels/exl3/exl3_linear_cuda.h"
#include "kernels/exl3/exl3_rotate_cuda.cuh"

namespace twinspark {
namespace {

using namespace exl3;  // NOLINT(google-build-using-namespace): one op, two files

constexpr int kThreads = 256;
constexpr int kStride = kBlockN + 1;  // floats; columns are read with lanes along k

// As Hadamard128, with lane l holding channels l, l + 32, l + 64, l + 96.
__device__ __forceinline__ void Hadamard128Strided(float (&v)[4], int lane) {
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    const float sign = (lane & mask) ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(0xffffffffu, v[i], mask));
    }
  }
  const float s0 = v[0] + v[1], d0 = v[0] - v[1];
  const float s1 = v[2] + v[3], d1 = v[2] - v[3];
  v[0] = s0 + s1;
  v[1] = d0 + d1;
  v[2] = s0 - s1;
  v[3] = d0 - d1;
}

template <int K, int kCodebook>
__global__ void __launch_bounds__(kThreads)
    Exl3ReconstructKernel(const Exl3ReconstructCudaParams p) {
  extern __shared__ float w[];  // [128][kStride]
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int block_n = static_cast<int>(blockIdx.x), block_k = static_cast<int>(blockIdx.y);
  const LaneWindow window = MakeLaneWindow<K>(lane);
  const int64_t tile_rows = p.k / 16;
  device::WaitForPrevious();
#pragma unroll 2
  for (int i = 0; i < 8; ++i) {  // tile row i, tile column warp
    const char* tile =
        reinterpret_cast<const char*>(p.matrix.trellis) +
        ((block_n * tile_rows + block_k * 8 + i) * 8 + warp) * (kTileBytesPerBit * K);
    uint32_t a[4];
    DecodeTile<K, kCodebook>(LoadTile<K>(tile, window), window.shift, a);
    const int n = warp * 16 + lane / 4, k = i * 16 + 2 * (lane & 3);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const float2 v = __half22float2(AsHalf2(a[r]));
      float* out = w + (k + (r >> 1) * 8) * kStride + n + (r & 1) * 8;
      out[0] = v.x;
      out[kStride] = v.y;
    }
  }
  __syncthreads();
  if (p.original_basis) {
    for (int c = warp; c < kBlockN; c += kThreads / 32) {  // along k
      float v[4];
#pragma unroll
      for (int i = 0; i < 4; ++i)
        v[i] = w[(lane + 32 * i) * kStride + c];
      Hadamard128Strided(v, lane);
#pragma unroll
      for (int i = 0; i < 4; ++i)
        w[(lane + 32 * i) * kStride + c] = v[i] * kHadamardScale;
    }
    __syncthreads();
  }
  for (int r = warp; r < kBlockN; r += kThreads / 32) {
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = w[r * kStride + 4 * lane + i];
    const int row = block_k * kBlockN + r, col = block_n * kBlockN + 4 * lane;
    float4 out = make_float4(v[0], v[1], v[2], v[3]);
    if (p.original_basis) {
      const float suh = __half2float(static_cast<const __half*>(p.matrix.suh)[row]);
      out = RotateOutput(out, LoadHalf4(p.matrix.svh, col), lane);
      out = make_float4(out.x * suh, out.y * suh, out.z * suh, out.w * suh);
    }
    char* base = static_cast<char*>(p.out) +
                 static_cast<int64_t>(row) * p.out_stride * (p.out_type == kTypeF32 ? 4 : 2);
    StoreRow4(base, p.out_type, col, p.n, out);
  }
  device::LaunchNext();
}

template <int K, int kCodebook>
cudaError_t Launch(const Exl3ReconstructCudaParams& p, void* stream) {
  auto* kernel = &Exl3ReconstructKernel<K, kCodebook>;
  constexpr int kSharedBytes = kBlockN * kStride * static_cast<int>(sizeof(float));
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return error;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(p.n / kBlockN), static_cast<unsigned>(p.k / kBlockN));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = kSharedBytes;
  config.stream = static_cast<cudaStream_t>(stream);
  return cudaLaunchKernelEx(&config, kernel, p);
}

template <int K>
cudaError_t PickCodebook(const Exl3ReconstructCudaParams& p, void* stream) {
  if (p.codebook == kCodebook3Inst) return Launch<K, kCodebook3Inst>(p, stream);
  if (p.codebook == kCodebookMcg) return Launch<K, kCodebookMcg>(p, stream);
  return Launch<K, kCodebookMul1>(p, stream);
}

// One thread per 16 bytes.
__global__ void __launch_bounds__(kThreads)
    Exl3PrepareKernel(const uint4* stored,
                      int64_t stored_blocks,
                      int64_t first_block,
                      int tile_rows,
                      int words,  // uint4 per tile row of a block
                      int64_t total,
                      uint4* prepared) {
  device::WaitForPrevious();
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= total) return;
  const int64_t run = i / words;
  const int64_t block = run / tile_rows, row = run - block * tile_rows;
  prepared[i] = stored[(row * stored_blocks + first_block + block) * words + (i - run * words)];
}

}  // namespace

CudaStatus Exl3PrepareCuda(const void* stored,
                           int stored_n,
                           int first_column,
                           int k,
                           int n,
                           int bits,
                           void* prepared,
                           void* stream) {
  if (k <= 0 || k % 16 != 0 || n <= 0 || n % kBlockN != 0 || stored_n % kBlockN != 0 ||
      first_column % kBlockN != 0 || first_column < 0 || first_column + n > stored_n || bits < 1 ||
      bits > 8) {
    return CudaError(-1, "exl3 prepare: k %d, columns %d + %d of %d (multiples of 128), K %d", k,
                     first_column, n, stored_n, bits);
  }
  const int words = 16 * bits;
  const int64_t total = static_cast<int64_t>(n / kBlockN) * (k / 16) * words;
  const cudaError_t error =
      LaunchDependent(&Exl3PrepareKernel, (total + kThreads - 1) / kThreads, kThreads, 0, stream,
                      static_cast<const uint4*>(stored), stored_n / kBlockN, first_column / kBlockN,
                      k / 16, words, total, static_cast<uint4*>(prepared));
  if (error != cudaSuccess) return CudaError(error, "exl3 prepare: %s", cudaGetErrorString(error));
  return {};
}

CudaStatus Exl3ReconstructCuda(const Exl3ReconstructCudaParams& p, void* stream) {
  if (p.k <= 0 || p.n <= 0 || p.k % kBlockN != 0 || p.n % kBlockN != 0 || p.bits < 1 ||
      p.bits > 8 || p.codebook < 0 || p.codebook > 2 || p.out_stride < p.n ||
      p.out_stride % 4 != 0 || p.k / kBlockN > 65535) {
    return CudaError(
        -1,
        "exl3 reconstruct: k %d, n %d (multiples of 128), K %d (1..8), codebook %d (0..2), "
        "stride %lld (a multiple of 4, at least n)",
        p.k, p.n, p.bits, p.codebook, static_cast<long long>(p.out_stride));
  }
  cudaError_t error = cudaErrorInvalidValue;
  switch (p.bits) {
    case 1:
      error = PickCodebook<1>(p, stream);
      break;
    case 2:
      error = PickCodebook<2>(p, stream);
      break;
    case 3:
      error = PickCodebook<3>(p, stream);
      break;
    case 4:
      error = PickCodebook<4>(p, stream);
      break;
    case 5:
      error = PickCodebook<5>(p, stream);
      break;
    case 6:
      error = PickCodebook<6>(p, stream);
      break;
    case 7:
      error = PickCodebook<7>(p, stream);
      break;
    case 8:
      error = PickCodebook<8>(p, stream);
      break;
    default:
      break;
  }
  if (error != cudaSuccess)
    return CudaError(error, "exl3 reconstruct: %s", cudaGetErrorString(error));
  return {};
}

}  // namespace twinspark
