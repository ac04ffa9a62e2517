// The mixture of experts: which way a call takes, and the launches of chunks: sort, place, rotate
// x, gate/up, activate, down, add. Few rows: moe_few_cuda.cu.
#include "kernels/moe/moe_cuda.h"

#include <algorithm>

#include <cuda_runtime.h>

#include "kernels/cuda/launch_cuda.cuh"
#include "kernels/device/ptx.cuh"
#include "kernels/exl3/exl3_gemm_cuda.cuh"
#include "kernels/exl3/exl3_gemm_plan_cuda.h"
#include "kernels/exl3/exl3_linear_cuda.h"
#include "kernels/moe/moe_chunk_plan_cuda.h"
#include "kernels/moe/moe_few_plan_cuda.h"
#include "kernels/moe/moe_rows_cuda.cuh"

namespace twinspark {
namespace {

using namespace exl3;  // NOLINT(google-build-using-namespace): one op, two files

constexpr int kSortThreads = 1024;
constexpr int kMaxExperts = 1024;
constexpr int kWarpsPerBlock = 8;
constexpr int kMaxChosen = 8;  // experts of a row

// Rows of an expert in a chunk.
struct ExpertRows {
  int32_t first, first_group, num_groups, taken;
};

// Scratch of a chunk, behind the counters.
struct ChunkLayout {
  int64_t groups;   // capacity
  int tile_groups;  // of one entry at most
  int64_t max_entries;
  size_t entries, expert_rows, order, place, num_entries, xh, xh_down, partial, bytes;
};

size_t RoundUp(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// Rows that share a decoded tile: enough for most experts at once; a narrower kernel is faster when
// experts have fewer rows. Not part of the result.
int TileGroups(const MoeCudaParams& p, int rows) {
  const double mean = static_cast<double>(rows) * p.num_chosen / p.num_experts;
  return mean <= 10 ? 3 : mean <= 42 ? 6 : kMaxTileGroups;
}

ChunkLayout LayOutChunk(const MoeCudaParams& p, int rows) {
  ChunkLayout l{};
  const int64_t slots = static_cast<int64_t>(rows) * p.num_chosen;
  const int64_t hit = std::min<int64_t>(slots, p.num_experts);
  l.groups = slots / kGroupRows + hit;
  l.tile_groups = TileGroups(p, rows);
  l.max_entries = l.groups / l.tile_groups + hit + 1;
  size_t at = kCudaCounterBytes;
  auto take = [&](size_t bytes) {
    const size_t offset = at;
    at += RoundUp(bytes);
    return offset;
  };
  l.entries = take(static_cast<size_t>(l.max_entries) * sizeof(MoeEntry));
  l.expert_rows = take(static_cast<size_t>(p.num_experts) * sizeof(ExpertRows));
  l.order = take(static_cast<size_t>(slots) * sizeof(int32_t));
  l.place = take(static_cast<size_t>(slots) * sizeof(MoePlace));
  l.num_entries = take(sizeof(int32_t));
  // xh of gate and up; the outputs of the down product take its place.
  l.xh = take(std::max(static_cast<size_t>(2 * l.groups * (p.d / kPairK)) * kPairBytes,
                       static_cast<size_t>(slots) * p.d * sizeof(float)));
  l.xh_down = take(static_cast<size_t>(l.groups * (p.inner / kPairK)) * kPairBytes);
  l.partial = take(static_cast<size_t>(slots) * 2 * p.inner * sizeof(float));
  l.bytes = at;
  return l;
}

// One block: counts slots per expert, cuts every expert's rows into entries of at most
// `tile_groups` groups and writes the sorted order. Which position a slot gets inside its expert
// may vary; results do not.
__global__ void __launch_bounds__(kSortThreads) MoeSortKernel(const int32_t* ids,
                                                              int num_slots,
                                                              int num_experts,
                                                              int tile_groups,
                                                              MoeEntry* entries,
                                                              ExpertRows* experts,
                                                              int32_t* num_entries) {
  __shared__ int32_t count[kMaxExperts];
  __shared__ int32_t warp_sums[32][3];
  device::WaitForPrevious();
  device::LaunchNext();
  const int tid = static_cast<int>(threadIdx.x);
  const int lane = tid & 31, warp = tid / 32;
  count[tid] = 0;
  __syncthreads();
  constexpr int kBatch = 8;  // loads in flight per thread
  for (int i = tid; i < num_slots; i += kBatch * kSortThreads) {
    int id[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const int at = i + b * kSortThreads;
      id[b] = at < num_slots ? __ldg(ids + at) : -1;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (id[b] >= 0) atomicAdd(&count[id[b]], 1);
    }
  }
  __syncthreads();
  // Exclusive sums over experts of slots, groups and entries; thread = expert.
  const int rows = tid < num_experts ? count[tid] : 0;
  const int groups = (rows + kGroupRows - 1) / kGroupRows;
  const int tiles = (groups + tile_groups - 1) / tile_groups;
  int v[3] = {rows, groups, tiles};
  int inclusive[3];
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    int sum = v[k];
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += other;
    }
    inclusive[k] = sum;
    if (lane == 31) warp_sums[warp][k] = sum;
  }
  __syncthreads();
  if (warp == 0) {
#pragma unroll
    for (int k = 0; k < 3; ++k) {
      int sum = warp_sums[lane][k];
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(0xffffffffu, sum, step);
        if (lane >= step) sum += other;
      }
      warp_sums[lane][k] = sum;
    }
  }
  __syncthreads();
  int before[3];
#pragma unroll
  for (int k = 0; k < 3; ++k) {
    before[k] = inclusive[k] - v[k] + (warp > 0 ? warp_sums[warp - 1][k] : 0);
  }
  if (tid < num_experts) experts[tid] = ExpertRows{before[0], before[1], groups, 0};
  if (tid == kSortThreads - 1) *num_entries = before[2] + tiles;
  for (int t = 0; t < tiles; ++t) {  // even tiles: no entry is much smaller than its neighbours
    const int begin = groups * t / tiles, end = groups * (t + 1) / tiles;
    entries[before[2] + t] =
        MoeEntry{tid, before[0] + begin * kGroupRows,
                 min(rows, end * kGroupRows) - begin * kGroupRows, before[1] + begin};
  }
}

// One thread per slot: takes the next row of its expert and writes where it is.
__global__ void __launch_bounds__(32 * kWarpsPerBlock) MoePlaceKernel(const int32_t* ids,
                                                                      int num_slots,
                                                                      int tile_groups,
                                                                      ExpertRows* experts,
                                                                      int32_t* order,
                                                                      MoePlace* place) {
  device::WaitForPrevious();
  device::LaunchNext();
  const int slot = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  if (slot >= num_slots) return;
  const int id = ids[slot];
  ExpertRows& expert = experts[id];
  const int rank = atomicAdd(&expert.taken, 1);
  const int position = expert.first + rank;
  order[position] = slot;
  // The inverse of the even cut above: the last entry that begins at or before the row.
  const int g = rank / kGroupRows, n = expert.num_groups;
  const int t = (n + tile_groups - 1) / tile_groups;
  int begin = 0, end = n;
  if (t > 1) {
    int e = g * t / n;
    if (n * (e + 1) / t <= g) ++e;
    begin = n * e / t;
    end = n * (e + 1) / t;
  }
  place[position] =
      MoePlace{id, expert.first_group + begin, end - begin, rank - begin * kGroupRows};
}

// xh for gate and up of a chunk: a warp per sorted position, matrix and four 128-blocks.
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    MoeRotateKernel(const __grid_constant__ GemmArgs args, const MoePlace* places, uint32_t* xh) {
  device::WaitForPrevious();
  device::LaunchNext();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int num_blocks = args.pairs / 4, parts = (num_blocks + 3) / 4;
  const int64_t job = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int64_t position2 = job / parts;
  const int part = static_cast<int>(job - position2 * parts);
  const int position = static_cast<int>(position2 >> 1), which = static_cast<int>(position2 & 1);
  if (position >= args.rows * args.num_chosen) return;
  const MoePlace place = places[position];
  const int row = args.order[position] / args.num_chosen;
  const MoeExpert& e = args.experts[place.expert];
  const GemmMatrix& input = args.matrices[0];
  // Lanes of blocks past the end repeat the last one and store nothing.
  const int block = part * 4 + lane / 8;
  const int col = min(block, num_blocks - 1) * kBlockN + (lane & 7) * 16;
  float x[16];
  Load16(RowPointer(input.x, args.x_type, input.x_stride, row) +
             col * (args.x_type == kTypeF32 ? 4 : 2),
         args.x_type, x);
  const void* suh = static_cast<const __half*>(which == 0 ? e.gate_suh : e.up_suh) + col;
  const Rotated16 rotated = RotateInput16(x, suh, lane);
  const TilePlace to{which * args.group_capacity + place.first_group, place.num_groups, place.row};
  StoreRotated16(xh, args.pairs, to, block, lane, rotated, block < num_blocks);
}

// Activation of one row of 128 columns of an expert, rotated as the input of its down matrix.
__device__ __forceinline__ void FinishGateUpRow(const GemmArgs& args,
                                                const GateUpScales& scales,
                                                int unit,
                                                const TilePlace& place,
                                                float4 gate_z,
                                                float4 up_z,
                                                int lane) {
  const ActivationRule rule = {args.limit, args.round_gate_up != 0, args.round_activation != 0};
  const uint2 words = ActivateRow(rule, scales, gate_z, up_z, lane);
  StoreRotated(static_cast<uint32_t*>(args.xh_down), args.down_pairs, place, unit, lane, words);
}

// Activation of a chunk: a warp per sorted position and 128 columns.
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    MoeActivateKernel(const __grid_constant__ GemmArgs args, const MoePlace* places) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int64_t job = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int position = static_cast<int>(job / args.num_blocks);
  const int unit = static_cast<int>(job - static_cast<int64_t>(position) * args.num_blocks);
  if (position >= args.rows * args.num_chosen) return;
  const MoePlace place = places[position];
  const GateUpScales scales = LoadGateUpScales(args.experts[place.expert], unit, lane);
  device::WaitForPrevious();
  device::LaunchNext();
  FinishGateUpRow(args, scales, unit, TilePlace{place.first_group, place.num_groups, place.row},
                  SumSegments(GateUpPartial(args, position, unit, 0, 1), 1, lane),
                  SumSegments(GateUpPartial(args, position, unit, 1, 1), 1, lane), lane);
}

// Rotates the experts' outputs and adds them for every row, ascending ids, then the shared expert:
// a warp per row and 128 columns.
__global__ void __launch_bounds__(32 * kWarpsPerBlock, 4)
    MoeCombineKernel(const __grid_constant__ GemmArgs args) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int64_t job = static_cast<int64_t>(blockIdx.x) * kWarpsPerBlock + threadIdx.x / 32;
  const int row = static_cast<int>(job / args.num_blocks);
  const int unit = static_cast<int>(job - static_cast<int64_t>(row) * args.num_blocks);
  if (row >= args.rows) return;
  const int chosen = args.num_chosen;
  const int64_t slot0 = static_cast<int64_t>(row) * chosen;
  const int col = unit * kBlockN + 4 * lane;
  // Ids and weights are older than the previous kernel.
  const RowSlots slots = RankSlots(args.ids, args.weights, slot0, chosen, lane);
  float4 v[kMaxChosen];
  RowSlot at[kMaxChosen];
#pragma unroll
  for (int r = 0; r < kMaxChosen; ++r) {
    if (r < chosen) at[r] = SlotOfRank(slots, r, chosen, lane);
  }
  device::WaitForPrevious();
  device::LaunchNext();
#pragma unroll
  for (int r = 0; r < kMaxChosen; ++r) {
    if (r < chosen) {
      v[r] = __ldcg(reinterpret_cast<const float4*>(
          args.slot_out + (slot0 + at[r].slot) * args.num_blocks * kBlockN + col));
    }
  }
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int r = 0; r < kMaxChosen; ++r) {
    if (r < chosen) {
      const float4 svh = LoadHalf4(args.experts[at[r].expert].down_svh, col);
      sum = AddWeighted(sum, at[r].weight, RotateOutput(v[r], svh, lane));
    }
  }
  const GemmMatrix& output = args.matrices[0];
  StoreExperts(sum, static_cast<const float*>(args.shared_out), args.shared_stride, output.y,
               output.y_stride, args.y_type, row, col, output.y_cols);
}

CudaStatus Validate(const MoeCudaParams& p) {
  if (p.rows < 1 || p.rows > kMaxMoeRows) {
    return CudaError(-1, "moe: %d rows, not 1..%d", p.rows, kMaxMoeRows);
  }
  if (p.d <= 0 || p.d % kBlockN != 0 || p.inner <= 0 || p.inner % kBlockN != 0) {
    return CudaError(-1, "moe: d = %d, inner = %d, want multiples of 128", p.d, p.inner);
  }
  if (p.num_experts < 1 || p.num_experts > kMaxExperts) {
    return CudaError(-1, "moe: %d experts, not 1..%d", p.num_experts, kMaxExperts);
  }
  if (p.num_chosen < 1 || p.num_chosen > kMaxChosen || p.num_chosen > p.num_experts) {
    return CudaError(-1, "moe: %d experts a row of %d, not 1..%d", p.num_chosen, p.num_experts,
                     kMaxChosen);
  }
  if (p.gate_up_bits < 1 || p.gate_up_bits > 8 || p.down_bits < 1 || p.down_bits > 8 ||
      p.codebook < 0 || p.codebook > 2) {
    return CudaError(-1, "moe: K = %d and %d (1..8), codebook %d (0..2)", p.gate_up_bits,
                     p.down_bits, p.codebook);
  }
  if (p.experts == nullptr || p.ids == nullptr || p.weights == nullptr || p.x == nullptr ||
      p.out == nullptr) {
    return CudaError(-1, "moe: null pointer");
  }
  if (p.x_stride < p.d || p.x_stride % 4 != 0 || p.out_stride < p.d || p.out_stride % 4 != 0 ||
      (p.shared_out != nullptr && (p.shared_stride < p.d || p.shared_stride % 4 != 0))) {
    return CudaError(-1, "moe: strides %lld, %lld, %lld, want multiples of 4 from d = %d on",
                     static_cast<long long>(p.x_stride), static_cast<long long>(p.out_stride),
                     static_cast<long long>(p.shared_stride), p.d);
  }
  return {};
}

// The cuts of the two products: parts of the result, so functions of the shape only.
int GateUpSegments(const MoeCudaParams& p) {
  // About 650 tasks for one row, five for each SM of the reference card: measured best of 2 to 10
  // segments from 1 to 8 rows.
  const int units = 2 * p.num_chosen * (p.inner / kBlockN);
  return std::clamp((650 + units / 2) / units, 1, std::clamp(p.d / kPairK / 20, 1, kMaxSegments));
}
int DownSegments(const MoeCudaParams& p) {
  return std::max(1, p.inner / kPairK / 80);
}

GemmArgs CommonArgs(const MoeCudaParams& p) {
  GemmArgs args{};
  args.rows = p.rows;
  args.x_type = p.x_type;
  args.y_type = p.out_type;
  args.num_matrices = 1;
  GemmMatrix& io = args.matrices[0];
  io.x = p.x;
  io.x_stride = p.x_stride;
  io.x_cols = p.d;
  io.y = p.out;
  io.y_stride = p.out_stride;
  io.y_cols = p.d;
  args.experts = p.experts;
  args.num_chosen = p.num_chosen;
  args.ids = p.ids;
  args.weights = p.weights;
  args.limit = p.limit;
  args.round_gate_up = p.round_gate_up;
  args.round_activation = p.round_activation;
  args.down_pairs = p.inner / kPairK;
  args.shared_out = p.shared_out;
  args.shared_stride = p.shared_stride;
  return args;
}

void MakeGateUp(const MoeCudaParams& p, GemmArgs* args) {
  args->kind = GemmKind::kGateUp;
  args->pairs = p.d / kPairK;
  args->num_segments = GateUpSegments(p);
  args->num_blocks = p.inner / kBlockN;
}
void MakeDown(const MoeCudaParams& p, GemmArgs* args) {
  args->kind = GemmKind::kDown;
  args->pairs = p.inner / kPairK;
  args->num_segments = DownSegments(p);
  args->num_blocks = p.d / kBlockN;
  args->whole = 1;
  args->resident = 0;
}

CudaStatus LaunchProduct(const MoeCudaParams& p,
                         const CudaDevice& device,
                         int bits,
                         int groups,
                         int64_t max_tasks,
                         GemmArgs args,
                         void* stream) {
  const int kernel_groups = p.codebook == 2 ? RoundGroups(groups) : kMaxTileGroups;
  const int longest =
      args.whole ? args.pairs : (args.pairs + args.num_segments - 1) / args.num_segments;
  size_t shared_bytes = 0;
  if (CudaStatus status = LayOutShared(device, bits, kernel_groups, longest, &args, &shared_bytes);
      !status.ok()) {
    return status;
  }
  if (CudaStatus status = FinishArgs(&args); !status.ok()) return status;
  const int64_t grid = std::min<int64_t>(
      max_tasks,
      static_cast<int64_t>(BlocksPerSm(device, kernel_groups, shared_bytes)) * device.num_sms);
  const auto error = static_cast<cudaError_t>(FindGemm(bits, p.codebook, kernel_groups, true)(
      args, static_cast<int>(grid), shared_bytes, stream));
  if (error != cudaSuccess) {
    return CudaError(error, "moe product K = %d: %s", bits, cudaGetErrorString(error));
  }
  return {};
}

int64_t Blocks(int64_t warps) {
  return (warps + kWarpsPerBlock - 1) / kWarpsPerBlock;
}

CudaStatus LaunchCombine(const MoeCudaParams& p, const GemmArgs& down, void* stream) {
  const cudaError_t error =
      LaunchDependent(&MoeCombineKernel, Blocks(static_cast<int64_t>(p.rows) * down.num_blocks),
                      32 * kWarpsPerBlock, 0, stream, down);
  if (error != cudaSuccess) return CudaError(error, "moe combine: %s", cudaGetErrorString(error));
  return {};
}

// Warpgroup instructions pay when experts have several rows. Not part of the result.
bool RunsWide(const MoeCudaParams& p,
              const CudaDevice& device,
              const GemmArgs& gate_up,
              const GemmArgs& down) {
  if (p.path == MoePath::kFragments || !MoeChunkFits(p, device, gate_up, down)) return false;
  return p.path == MoePath::kWarpgroups || p.rows * p.num_chosen >= 12 * p.num_experts;
}

CudaStatus RunChunk(const MoeCudaParams& p,
                    const CudaDevice& device,
                    const CudaWorkspace& workspace,
                    void* stream) {
  ChunkLayout l = LayOutChunk(p, p.rows);
  char* scratch = static_cast<char*>(workspace.data);
  const int slots = p.rows * p.num_chosen;
  GemmArgs args = CommonArgs(p);
  args.entries = reinterpret_cast<const MoeEntry*>(scratch + l.entries);
  args.order = reinterpret_cast<const int32_t*>(scratch + l.order);
  args.num_entries = reinterpret_cast<const int32_t*>(scratch + l.num_entries);
  args.xh_down = scratch + l.xh_down;
  args.partial = reinterpret_cast<float*>(scratch + l.partial);
  args.slot_out = reinterpret_cast<float*>(scratch + l.xh);
  args.group_capacity = l.groups;
  args.counters = static_cast<uint32_t*>(workspace.data);
  args.whole = 1;
  const MoePlace* places = reinterpret_cast<const MoePlace*>(scratch + l.place);
  GemmArgs gate_up = args, down = args;
  MakeGateUp(p, &gate_up);
  gate_up.xh = scratch + l.xh;
  MakeDown(p, &down);
  down.xh = args.xh_down;
  down.group_capacity = 0;
  for (GemmArgs* product : {&gate_up, &down}) {
    if (CudaStatus status = FinishArgs(product); !status.ok()) return status;
  }
  const bool wide = RunsWide(p, device, gate_up, down);
  if (wide) l.tile_groups = kChunkTileGroups;

  cudaError_t error =
      LaunchDependent(&MoeSortKernel, 1, kSortThreads, 0, stream, p.ids, slots, p.num_experts,
                      l.tile_groups, reinterpret_cast<MoeEntry*>(scratch + l.entries),
                      reinterpret_cast<ExpertRows*>(scratch + l.expert_rows),
                      reinterpret_cast<int32_t*>(scratch + l.num_entries));
  if (error != cudaSuccess) return CudaError(error, "moe sort: %s", cudaGetErrorString(error));
  error =
      LaunchDependent(&MoePlaceKernel, (slots + 32 * kWarpsPerBlock - 1) / (32 * kWarpsPerBlock),
                      32 * kWarpsPerBlock, 0, stream, p.ids, slots, l.tile_groups,
                      reinterpret_cast<ExpertRows*>(scratch + l.expert_rows),
                      reinterpret_cast<int32_t*>(scratch + l.order),
                      reinterpret_cast<MoePlace*>(scratch + l.place));
  if (error != cudaSuccess) return CudaError(error, "moe place: %s", cudaGetErrorString(error));

  if (wide) {
    const MoeChunkBuffers buffers = {args.entries, args.num_entries, args.order,
                                     places,       l.groups,         scratch + l.xh,
                                     args.xh_down, args.slot_out,    args.counters};
    if (CudaStatus status = RunMoeChunkProducts(p, device, gate_up, down, buffers, stream);
        !status.ok()) {
      return status;
    }
    return LaunchCombine(p, down, stream);
  }
  error = LaunchDependent(
      &MoeRotateKernel, Blocks(static_cast<int64_t>(slots) * 2 * ((gate_up.pairs / 4 + 3) / 4)),
      32 * kWarpsPerBlock, 0, stream, gate_up, places, reinterpret_cast<uint32_t*>(scratch + l.xh));
  if (error != cudaSuccess) return CudaError(error, "moe rotate: %s", cudaGetErrorString(error));
  const int groups = std::min(l.tile_groups, (p.rows + kGroupRows - 1) / kGroupRows);
  const int64_t everywhere = int64_t{1} << 30;
  if (CudaStatus status =
          LaunchProduct(p, device, p.gate_up_bits, groups, everywhere, gate_up, stream);
      !status.ok()) {
    return status;
  }
  error =
      LaunchDependent(&MoeActivateKernel, Blocks(static_cast<int64_t>(slots) * gate_up.num_blocks),
                      32 * kWarpsPerBlock, 0, stream, gate_up, places);
  if (error != cudaSuccess) return CudaError(error, "moe activate: %s", cudaGetErrorString(error));
  if (CudaStatus status = LaunchProduct(p, device, p.down_bits, groups, everywhere, down, stream);
      !status.ok()) {
    return status;
  }
  return LaunchCombine(p, down, stream);
}

}  // namespace

size_t MoeCudaWorkspaceBytes(const MoeCudaParams& params, int rows) {
  size_t bytes = MoeFewWorkspaceBytes(params, std::min(rows, kMaxMoeSmallRows),
                                      GateUpSegments(params), DownSegments(params));
  if (!IsMoeFew(params, rows)) bytes = std::max(bytes, LayOutChunk(params, rows).bytes);
  return bytes;
}

CudaStatus MoeCuda(const MoeCudaParams& params,
                   const CudaDevice& device,
                   const CudaWorkspace& workspace,
                   void* stream) {
  if (CudaStatus status = Validate(params); !status.ok()) return status;
  int slice = params.rows;
  while (slice > 1 && workspace.bytes < MoeCudaWorkspaceBytes(params, slice))
    slice = (slice + 1) / 2;
  if (workspace.bytes < MoeCudaWorkspaceBytes(params, slice)) {
    return CudaError(-2, "moe: workspace has %zu bytes, one row needs %zu", workspace.bytes,
                     MoeCudaWorkspaceBytes(params, 1));
  }
  for (int begin = 0; begin < params.rows; begin += slice) {
    MoeCudaParams p = params;
    p.rows = std::min(slice, params.rows - begin);
    p.ids += static_cast<int64_t>(begin) * params.num_chosen;
    p.weights += static_cast<int64_t>(begin) * params.num_chosen;
    p.x = static_cast<const char*>(params.x) +
          begin * params.x_stride * (params.x_type == kTypeF32 ? 4 : 2);
    p.out = static_cast<char*>(params.out) +
            begin * params.out_stride * (params.out_type == kTypeF32 ? 4 : 2);
    if (params.shared_out != nullptr) p.shared_out += begin * params.shared_stride;
    const CudaStatus status = IsMoeFew(p, p.rows) ? RunMoeFew(p, GateUpSegments(p), DownSegments(p),
                                                              device, workspace, stream)
                                                  : RunChunk(p, device, workspace, stream);
    if (!status.ok()) return status;
  }
  return {};
}

}  // namespace twinspark
