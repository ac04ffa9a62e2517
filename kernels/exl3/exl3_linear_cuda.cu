// Launches of the EXL3 linear, and the kernels before and after the product (exl3_gemm_cuda.cuh).
#include "kernels/exl3/exl3_linear_cuda.h"

#include <algorithm>

#include <cuda_runtime.h>

#include "kernels/cuda/launch_cuda.cuh"
#include "kernels/device/ptx.cuh"
#include "kernels/exl3/exl3_gemm_plan_cuda.h"
#include "kernels/exl3/exl3_rotate_cuda.cuh"
#include "kernels/exl3/exl3_warpgroup_cuda.cuh"

namespace twinspark {
namespace {

using namespace exl3;  // NOLINT(google-build-using-namespace): one op, two files

constexpr int kWarpsPerBlock = 8;

// Rotates all inputs: one warp per matrix, row and 128 channels.
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    Exl3RotateKernel(const __grid_constant__ GemmArgs args, uint32_t* xh) {
  device::LaunchNext();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int num_blocks = args.pairs / 4;
  const int64_t job = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int64_t row_of_all = job / num_blocks;
  const int block = static_cast<int>(job - row_of_all * num_blocks);
  const int matrix = static_cast<int>(row_of_all / args.rows);
  const int row = static_cast<int>(row_of_all - static_cast<int64_t>(matrix) * args.rows);
  if (matrix >= args.num_matrices) return;
  const GemmMatrix& m = args.matrices[matrix];
  const int col = block * kBlockN + 4 * lane;
  const float4 suh = LoadHalf4(m.suh, col);
  device::WaitForPrevious();
  const float4 x =
      LoadRow4(RowPointer(m.x, args.x_type, m.x_stride, row), args.x_type, col, m.x_cols);
  const uint2 words = RotateInput(x, suh, lane, args.rounding_upstream != 0);
  const int tile = row / kGroupRows / args.tile_groups;
  const int first_group = tile * args.tile_groups;
  const TilePlace place{static_cast<int64_t>(matrix) * args.num_groups + first_group,
                        min(args.tile_groups, args.num_groups - first_group),
                        row - first_group * kGroupRows};
  StoreRotated(xh, args.pairs, place, block, lane, words);
}

// The same for one tile of rows of the paths that kernels for few rows take. It lets the product
// start at once, whose weights then come in while the kernel before this one still runs. Small
// blocks of 32 registers a thread: an SM has room for one beside two blocks of the product, and
// what does not fit there keeps a cluster from being placed. Blocks without work wait too
// (Exl3LinearPlan::rotate_blocks): where one is, there is no room for two blocks of the product at
// once, so that they spread over the SMs.
constexpr int kRotateFewWarps = 4, kRotateFewBlocks = 256;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200  // all the threads that an SM holds
constexpr int kRotateFewPerSm = 12;
#else
constexpr int kRotateFewPerSm = 16;
#endif
__global__ void __launch_bounds__(32 * kRotateFewWarps, kRotateFewPerSm)
    Exl3RotateFewKernel(const __grid_constant__ GemmArgs args, char* xh, int warps_per_block) {
  device::LaunchNext();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int job = static_cast<int>(blockIdx.x * kRotateFewWarps + threadIdx.x / 32);
  const int block = job / warps_per_block;
  int row = job - block * warps_per_block;
  if (block >= args.pairs / 4) {
    device::WaitForPrevious();
    return;
  }
  const GemmMatrix& m = args.matrices[blockIdx.y];
  const int col = block * kBlockN + 4 * lane;
  const float4 suh = LoadHalf4(m.suh, col);
  char* out = xh + (static_cast<int64_t>(blockIdx.y) * args.pairs + 4 * block + lane / 8) *
                       args.num_groups * kPairBytes;
  const bool warpgroup = args.warpgroup != 0;
  auto rotate = [&](int r, float4 x) {
    const uint2 words = RotateInput(x, suh, lane, args.rounding_upstream != 0);
    uint32_t* to = reinterpret_cast<uint32_t*>(out + r / kGroupRows * kPairBytes);
    const int in_group = r % kGroupRows;
    if (warpgroup) {
      *reinterpret_cast<uint2*>(to + WarpgroupWord(lane, in_group)) = words;
    } else {
      to += FragmentWord(lane, in_group);
      to[0] = words.x;
      to[4] = words.y;
    }
  };
  device::WaitForPrevious();
  if (args.x_type == kTypeF32) {
    for (; row < args.rows; row += warps_per_block)
      rotate(row, LoadRow4(RowPointer(m.x, kTypeF32, m.x_stride, row), kTypeF32, col, m.x_cols));
    return;
  }
  constexpr int kInFlight = 4;
#pragma unroll 1
  for (; row < args.rows; row += kInFlight * warps_per_block) {
    uint2 raw[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int r = row + i * warps_per_block;
      raw[i] = make_uint2(0, 0);
      if (r < args.rows && col < m.x_cols) {
        raw[i] =
            *reinterpret_cast<const uint2*>(RowPointer(m.x, args.x_type, m.x_stride, r) + 2 * col);
      }
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int r = row + i * warps_per_block;
      if (r < args.rows) rotate(r, ToFloat4(raw[i], args.x_type));
    }
  }
}

// Adds the segments and rotates the outputs: one warp per row and 128 outputs.
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    Exl3FinishKernel(const __grid_constant__ GemmArgs args) {
  device::LaunchNext();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int64_t job = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  if (job >= static_cast<int64_t>(args.num_units) * args.rows) return;
  const int unit = static_cast<int>(job / args.rows);
  const int row = static_cast<int>(job - static_cast<int64_t>(unit) * args.rows);
  const GemmMatrix& m = args.matrices[MatrixOfUnit(args, unit)];
  const float4 svh = LoadHalf4(m.svh, (unit - m.first_unit) * kBlockN + 4 * lane);
  device::WaitForPrevious();
  const float4 z =
      SumSegments(args.partial + job * args.num_segments * kBlockN, args.num_segments, lane);
  FinishLinearRow(args, m, unit - m.first_unit, row, z, svh, lane);
}

}  // namespace

CudaStatus Exl3LinearCuda(const Exl3LinearCudaParams& params,
                          const CudaDevice& device,
                          const CudaWorkspace& workspace,
                          void* stream) {
  Exl3LinearPlan plan;
  if (CudaStatus status = PlanExl3Linear(params, device, &plan); !status.ok()) return status;
  const size_t need = kCudaCounterBytes + plan.xh_bytes + plan.partial_bytes;
  if (workspace.bytes < need) {
    return CudaError(-2, "exl3 linear: workspace has %zu bytes, %d rows need %zu", workspace.bytes,
                     params.rows, need);
  }
  GemmArgs& args = plan.args;
  char* scratch = static_cast<char*>(workspace.data);
  args.counters = reinterpret_cast<uint32_t*>(scratch);
  args.xh = scratch + kCudaCounterBytes;
  args.partial = reinterpret_cast<float*>(scratch + kCudaCounterBytes + plan.xh_bytes);
  cudaError_t error = cudaSuccess;
  if (!args.resident && args.rows <= kMaxFewRows && args.num_tiles == 1) {
    const int blocks = args.pairs / 4, matrices = args.num_matrices;
    const int warps_per_block =
        std::clamp(kRotateFewBlocks * kRotateFewWarps / (blocks * matrices), 1, args.rows);
    const int grid = std::max((blocks * warps_per_block + kRotateFewWarps - 1) / kRotateFewWarps,
                              (plan.rotate_blocks + matrices - 1) / matrices);
    error = LaunchDependent(
        &Exl3RotateFewKernel, dim3(static_cast<unsigned>(grid), static_cast<unsigned>(matrices)),
        32 * kRotateFewWarps, 0, stream, args, scratch + kCudaCounterBytes, warps_per_block);
    if (error != cudaSuccess) return CudaError(error, "exl3 rotate: %s", cudaGetErrorString(error));
  } else if (!args.resident) {
    const int64_t warps = static_cast<int64_t>(args.num_matrices) * args.rows * (args.pairs / 4);
    error = LaunchDependent(&Exl3RotateKernel, (warps + kWarpsPerBlock - 1) / kWarpsPerBlock,
                            32 * kWarpsPerBlock, 0, stream, args,
                            reinterpret_cast<uint32_t*>(scratch + kCudaCounterBytes));
    if (error != cudaSuccess) return CudaError(error, "exl3 rotate: %s", cudaGetErrorString(error));
  }
  if (plan.cluster > 0) {
    error = static_cast<cudaError_t>(
        LaunchCluster(FindClusterKernel(params.bits, plan.kernel_groups, plan.form), args,
                      plan.grid, plan.cluster, plan.shared_bytes, stream));
  } else {
    const GemmLauncher launch =
        plan.form != TaskForm::kOne
            ? FindFew(params.bits, plan.kernel_groups, plan.form)
            : FindGemm(params.bits, params.codebook, plan.kernel_groups, args.num_tiles > 1);
    error = static_cast<cudaError_t>(launch(args, plan.grid, plan.shared_bytes, stream));
  }
  if (error != cudaSuccess) return CudaError(error, "exl3 product: %s", cudaGetErrorString(error));
  if (args.external_finish) {
    const int64_t warps = static_cast<int64_t>(args.num_units) * args.rows;
    error = LaunchDependent(&Exl3FinishKernel, (warps + kWarpsPerBlock - 1) / kWarpsPerBlock,
                            32 * kWarpsPerBlock, 0, stream, args);
    if (error != cudaSuccess) return CudaError(error, "exl3 finish: %s", cudaGetErrorString(error));
  }
  return {};
}

}  // namespace twinspark
