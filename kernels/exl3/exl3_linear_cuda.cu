// Plans and launches of the EXL3 linear; the product kernel is exl3_gemm_cuda.cuh.
#include "kernels/exl3/exl3_linear_cuda.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <iterator>

#include <cuda_runtime.h>

#include "kernels/cuda/launch_cuda.cuh"
#include "kernels/device/ptx.cuh"
#include "kernels/exl3/exl3_cluster_cuda.cuh"
#include "kernels/exl3/exl3_gemm_plan_cuda.h"
#include "kernels/exl3/exl3_rotate_cuda.cuh"

namespace twinspark {
namespace {

using namespace exl3;  // NOLINT(google-build-using-namespace): one op, two files

constexpr int kWarpsPerBlock = 8;

// Rotates all inputs: one warp per matrix, row and 128 channels.
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    Exl3RotateKernel(const __grid_constant__ GemmArgs args, uint32_t* xh) {
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
  device::LaunchNext();
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

// Adds the segments and rotates the outputs: one warp per row and 128 outputs.
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    Exl3FinishKernel(const __grid_constant__ GemmArgs args) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int64_t job = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  if (job >= static_cast<int64_t>(args.num_units) * args.rows) return;
  const int unit = static_cast<int>(job / args.rows);
  const int row = static_cast<int>(job - static_cast<int64_t>(unit) * args.rows);
  const GemmMatrix& m = args.matrices[MatrixOfUnit(args, unit)];
  const float4 svh = LoadHalf4(m.svh, (unit - m.first_unit) * kBlockN + 4 * lane);
  device::WaitForPrevious();
  device::LaunchNext();
  const float4 z =
      SumSegments(args.partial + job * args.num_segments * kBlockN, args.num_segments, lane);
  FinishLinearRow(args, m, unit - m.first_unit, row, z, svh, lane);
}

CudaStatus Validate(const Exl3LinearCudaParams& p) {
  if (p.k <= 0 || p.k % kBlockN != 0) {
    return CudaError(-1, "exl3 linear: k = %d is not a positive multiple of 128", p.k);
  }
  if (p.bits < 1 || p.bits > 8) return CudaError(-1, "exl3 linear: K = %d, not 1..8", p.bits);
  if (p.codebook < 0 || p.codebook > 2) {
    return CudaError(-1, "exl3 linear: codebook %d, not 0..2", p.codebook);
  }
  if (p.rows < 1 || p.rows > kMaxLinearRows) {
    return CudaError(-1, "exl3 linear: %d rows, not 1..%d", p.rows, kMaxLinearRows);
  }
  if (p.num_matrices < 1 || p.num_matrices > kMaxMatrices) {
    return CudaError(-1, "exl3 linear: %d matrices, not 1..%d", p.num_matrices, kMaxMatrices);
  }
  for (int i = 0; i < p.num_matrices; ++i) {
    const GemmMatrix& m = p.matrices[i];
    if (m.num_blocks < 1) return CudaError(-1, "exl3 linear: matrix %d has no outputs", i);
    if (m.x_cols < 4 || m.x_cols > p.k || m.x_cols % 4 != 0 || m.x_stride % 4 != 0) {
      return CudaError(-1,
                       "exl3 linear: matrix %d: %d input columns (stride %lld), want a multiple "
                       "of 4 up to k = %d",
                       i, m.x_cols, static_cast<long long>(m.x_stride), p.k);
    }
    if (m.y_cols < 4 || m.y_cols > m.num_blocks * kBlockN || m.y_cols % 4 != 0 ||
        m.y_stride % 4 != 0) {
      return CudaError(-1,
                       "exl3 linear: matrix %d: %d output columns (stride %lld), want a multiple "
                       "of 4 up to n = %d",
                       i, m.y_cols, static_cast<long long>(m.y_stride), m.num_blocks * kBlockN);
    }
    for (const void* pointer : {static_cast<const void*>(m.trellis), m.suh, m.svh, m.bias, m.x,
                                static_cast<const void*>(m.y)}) {
      if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) {
        return CudaError(-1, "exl3 linear: matrix %d has a pointer that is not 16-byte aligned", i);
      }
    }
    if (m.trellis == nullptr || m.suh == nullptr || m.svh == nullptr || m.x == nullptr ||
        m.y == nullptr) {
      return CudaError(-1, "exl3 linear: matrix %d has a null pointer", i);
    }
  }
  return {};
}

// Largest number of rows of a cluster kernel.
constexpr int kMaxClusterRows = 48;

// Fills `plan` for clusters in which `units` blocks of outputs share the rotation of x; `streamed`:
// a kernel before rotates it. False if that does not fit, all clusters at once.
bool PlanCluster(const Exl3LinearCudaParams& params,
                 const CudaDevice& device,
                 GemmArgs args,
                 int units,
                 bool streamed,
                 Exl3LinearPlan* plan) {
  const int cluster = args.num_segments * units;
  if (params.codebook != 2 || args.rows > kMaxClusterRows || cluster > kMaxClusterSize ||
      args.num_units % units != 0 || (units > 1 && (args.num_matrices > 1 || streamed))) {
    return false;
  }
  args.cluster_units = units;
  args.whole = 0;
  args.external_finish = 0;
  args.resident = !streamed;
  if (!FinishArgs(&args).ok()) return false;
  int longest = 0;
  for (int s = 0; s < args.num_segments; ++s) {
    longest = std::max(longest, args.segment_begin[s + 1] - args.segment_begin[s]);
  }
  plan->kernel_groups = RoundGroups(args.tile_groups);
  int blocks_per_sm = 0;
  if (!LayOutCluster(device, params.bits, plan->kernel_groups, longest, &args, &plan->shared_bytes,
                     &blocks_per_sm)
           .ok() ||
      args.num_units / units > device.cluster_places[blocks_per_sm - 1][cluster]) {
    return false;
  }
  plan->grid = args.num_units * args.num_segments;
  plan->cluster = cluster;
  plan->xh_bytes =
      streamed ? static_cast<size_t>(args.num_matrices) * args.num_groups * args.pairs * kPairBytes
               : 0;
  plan->partial_bytes = 0;
  plan->args = args;
  return true;
}

// The fastest way on clusters, if there is one; limits as measured. Rotating in every block costs
// less than a kernel that rotates and its results' way through memory, unless blocks share an SM
// and have many rows.
bool ChooseCluster(const Exl3LinearCudaParams& params,
                   const CudaDevice& device,
                   const GemmArgs& args,
                   Exl3LinearPlan* plan) {
  constexpr int kResidentRowsBeside = 16, kSharedRowsAlone = 33;
  if (params.cluster_units > 0) {
    return PlanCluster(params, device, args, params.cluster_units, false, plan);
  }
  if (params.cluster_units == kStreamedClusters) {
    return PlanCluster(params, device, args, 1, true, plan);
  }
  const bool alone = args.num_units * args.num_segments <= device.num_sms;
  if (!alone && args.rows > kResidentRowsBeside) {
    return PlanCluster(params, device, args, 1, true, plan);
  }
  if (alone && args.rows >= kSharedRowsAlone && PlanCluster(params, device, args, 2, false, plan)) {
    return true;
  }
  return PlanCluster(params, device, args, 1, false, plan) ||
         PlanCluster(params, device, args, 1, true, plan);
}

}  // namespace

int Exl3Segments(int k, int num_units) {
  // Clusters of 1, 2, .. blocks that the reference card holds with one and with two blocks per SM.
  constexpr int kAlone[] = {132, 66, 39, 30, 22, 17, 15, 15};
  constexpr int kBeside[] = {264, 132, 79, 62, 47, 39, 32, 30, 23, 21, 16, 16, 14, 14, 14, 14};
  constexpr double kPlaces = 264;
  // Fitted times in us on it, between 1 and 48 rows: clusters that leave room for the next launch;
  // clusters that do not; tasks without clusters, in rounds. A pair is two tile rows.
  const int pairs = k / kPairK;
  int best = 1;
  double best_us = 1e30;
  for (int s = 1; s <= std::max(1, std::min(pairs / 4, kMaxSegments)); ++s) {
    const double length = static_cast<double>(pairs) / s;
    double us;
    if (s <= static_cast<int>(std::size(kAlone)) && num_units <= kAlone[s - 1]) {
      us = 2.7 + 0.21 * length;
    } else if (s <= static_cast<int>(std::size(kBeside)) && num_units <= kBeside[s - 1]) {
      us = 3.7 + 0.33 * length;
    } else {
      us = 5.0 + std::ceil(num_units * s / kPlaces) * (0.31 * length + 0.9) + 0.03 * s;
    }
    if (us < best_us - 1e-9) {
      best_us = us;
      best = s;
    }
  }
  return best;
}

CudaStatus PlanExl3Linear(const Exl3LinearCudaParams& params,
                          const CudaDevice& device,
                          Exl3LinearPlan* plan) {
  if (CudaStatus status = Validate(params); !status.ok()) return status;
  GemmArgs args{};
  args.kind = GemmKind::kLinear;
  args.rounding_upstream = params.rounding_upstream;
  args.pairs = params.k / kPairK;
  args.rows = params.rows;
  args.x_type = params.x_type;
  args.y_type = params.y_type;
  args.num_matrices = params.num_matrices;
  int units = 0;
  for (int i = 0; i < params.num_matrices; ++i) {
    args.matrices[i] = params.matrices[i];
    args.matrices[i].first_unit = units;
    units += params.matrices[i].num_blocks;
  }
  args.num_units = units;
  args.num_segments = params.num_segments > 0 ? params.num_segments : Exl3Segments(params.k, units);
  args.num_groups = (params.rows + kGroupRows - 1) / kGroupRows;
  // Few tasks: more of them, each of fewer rows, rather than SMs without work.
  const bool few = units * args.num_segments < device.num_sms && args.num_groups <= kMaxTileGroups;
  const int most_groups = few ? kMaxTileGroups / 2 : kMaxTileGroups;
  args.num_tiles = (args.num_groups + most_groups - 1) / most_groups;
  args.tile_groups = (args.num_groups + args.num_tiles - 1) / args.num_tiles;
  args.num_tiles = (args.num_groups + args.tile_groups - 1) / args.tile_groups;
  plan->cluster = 0;
  if (params.cluster_units != kNoClusters && ChooseCluster(params, device, args, plan)) return {};
  if (params.cluster_units > 0 || params.cluster_units == kStreamedClusters) {
    return CudaError(-1, "exl3 linear: no cluster of %d x %d segments for %d rows here",
                     params.cluster_units, args.num_segments, params.rows);
  }
  // One task per segment while whole outputs would leave SMs without work.
  args.whole = args.num_segments == 1 || units * args.num_tiles * 2 >= 3 * device.num_sms;
  args.external_finish = !args.whole && params.rows > kGroupRows;
  // Rotating in every block saves a launch (about 1.5 us) and costs 2 % of the product per row.
  const double weights = static_cast<double>(params.k) * units * kBlockN;
  args.resident = params.rows <= kResidentRows && weights * params.rows < kResidentWork;
  plan->kernel_groups = params.codebook == 2 ? RoundGroups(args.tile_groups) : kMaxTileGroups;
  const int longest =
      args.whole ? args.pairs : (args.pairs + args.num_segments - 1) / args.num_segments;
  if (args.resident &&
      static_cast<size_t>(plan->kernel_groups) * longest * kPairBytes > kResidentLimit) {
    args.resident = 0;
  }
  if (CudaStatus status = LayOutShared(device, params.bits, plan->kernel_groups, longest,
                                       /*route=*/false, &args, &plan->shared_bytes);
      !status.ok()) {
    return status;
  }
  if (CudaStatus status = FinishArgs(&args); !status.ok()) return status;
  const int64_t tasks =
      static_cast<int64_t>(units) * args.num_tiles * (args.whole ? 1 : args.num_segments);
  plan->grid = static_cast<int>(std::min<int64_t>(
      tasks, BlocksPerSm(device, plan->kernel_groups, plan->shared_bytes) * device.num_sms));
  // So that a block keeps its segment, and with it its rotated inputs.
  if (args.resident && !args.whole && plan->grid < tasks && plan->grid > args.num_segments) {
    plan->grid -= plan->grid % args.num_segments;
  }
  plan->xh_bytes = args.resident ? 0
                                 : static_cast<size_t>(params.num_matrices) * args.num_groups *
                                       args.pairs * kPairBytes;
  plan->partial_bytes = args.whole ? 0
                                   : static_cast<size_t>(units) * params.rows * args.num_segments *
                                         kBlockN * sizeof(float);
  if (static_cast<size_t>(units) * args.num_tiles * sizeof(uint32_t) > kCudaCounterBytes &&
      !args.whole) {
    return CudaError(-1, "exl3 linear: %d output blocks in one call", units);
  }
  plan->args = args;
  return {};
}

size_t Exl3LinearWorkspaceBytes(const Exl3LinearCudaParams& params,
                                const CudaDevice& device,
                                int rows) {
  size_t bytes = 0;
  // Not monotonic in the rows: the paths need different things.
  for (int r :
       {1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192}) {
    Exl3LinearCudaParams p = params;
    p.rows = std::min(r, rows);
    Exl3LinearPlan plan;
    if (PlanExl3Linear(p, device, &plan).ok()) {
      bytes = std::max(bytes, plan.xh_bytes + plan.partial_bytes);
    }
    if (r >= rows) break;
  }
  return kCudaCounterBytes + bytes + bytes / 2;  // between the sampled row counts
}

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
  if (!args.resident) {
    const int64_t warps = static_cast<int64_t>(args.num_matrices) * args.rows * (args.pairs / 4);
    error = LaunchDependent(&Exl3RotateKernel, (warps + kWarpsPerBlock - 1) / kWarpsPerBlock,
                            32 * kWarpsPerBlock, 0, stream, args,
                            reinterpret_cast<uint32_t*>(scratch + kCudaCounterBytes));
    if (error != cudaSuccess) return CudaError(error, "exl3 rotate: %s", cudaGetErrorString(error));
  }
  if (plan.cluster > 0) {
    error = static_cast<cudaError_t>(
        LaunchCluster(FindClusterKernel(params.bits, plan.kernel_groups), args, plan.grid,
                      plan.cluster, plan.shared_bytes, stream));
  } else {
    const GemmLauncher launch =
        FindGemm(params.bits, params.codebook, plan.kernel_groups, args.num_tiles > 1);
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
