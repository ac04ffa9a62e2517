// Launches of few rows: rotate, gate/up, activate, down, add. Every block sorts the few ids by
// itself.
//
// Each kernel starts while the one before it runs (programmatic dependent launch) and prepares what
// does not depend on it. The experts are taken in two parts, so that two of the four borders cost
// little: gate/up lets the activation start when the early part is done; it activates that part at
// once and lets down start, which multiplies it while gate/up ends and the activation does the
// rest. Who relies on what:
//   rotate    waits, then lets gate/up start: from here on the ids are old
//   gate/up   its producers wait for the inputs; a block without early tasks says so behind a
//             fence, so whoever starts when all have said so finds the early sums; without an
//             early part it lets the activation start at once, which then only waits
//   activate  early part, fence, lets down start; waits for gate/up; late part
//   down      lets the sum start at once; early part; its producers wait for the late one
//   add       waits
// Every kernel waits before it ends, so the end of one is the end of all before it.
#include "kernels/moe/moe_few_cuda.cuh"

#include <algorithm>

#include <cuda_runtime.h>

#include "kernels/cuda/launch_cuda.cuh"
#include "kernels/device/ptx.cuh"
#include "kernels/exl3/exl3_gemm_plan_cuda.h"
#include "kernels/exl3/exl3_rotate_cuda.cuh"
#include "kernels/moe/moe_few_plan_cuda.h"
#include "kernels/moe/moe_rows_cuda.cuh"

namespace twinspark {
namespace {

using namespace exl3;  // NOLINT(google-build-using-namespace): one op, several files

constexpr int kWarpsPerBlock = 8;
constexpr int kMaxChosen = 8;
constexpr int kActivateWarps = 4;  // of a block that finds room beside the products' blocks
// Stages of the ring; in deeper ones a block takes its next task long before it needs it.
constexpr int kMaxStages = 5;
static_assert(kMaxStages <= kFewMaxStages);
// At most so many slots, and at most half of them, are late: enough to hide the activation of the
// early ones.
constexpr int kLateSlots = 12;
// Below so many tasks for an SM all are dealt.
constexpr int kDealtTasks = 6;

// Where a slot stands among the sorted ones: an expert's first group has the number of its first
// sorted position. One warp.
__device__ __forceinline__ TilePlace FindPlace(const int32_t* ids, int n, int slot, int lane) {
  const int id = ids[slot];
  int less = 0, before = 0, equal = 0;
  for (int j = lane; j < n; j += 32) {
    const int other = ids[j];
    less += other < id;
    before += other == id && j < slot;
    equal += other == id;
  }
  less = __reduce_add_sync(0xffffffffu, less);
  before = __reduce_add_sync(0xffffffffu, before);
  equal = __reduce_add_sync(0xffffffffu, equal);
  return TilePlace{less, (equal + kGroupRows - 1) / kGroupRows, before};
}

struct FewRotateArgs {
  const void* x;
  int64_t x_stride;
  int32_t x_type;
  int32_t blocks, parts;  // of 128 channels; blocks of threads that share them
  int32_t num_slots, num_chosen;
  const MoeExpert* experts;
  const int32_t* ids;
  uint32_t* xh;
};

// Inputs of gate and up: a block per slot, matrix and 8 blocks of 128 channels, one a warp.
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    MoeRotateFewKernel(const __grid_constant__ FewRotateArgs args) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int job = static_cast<int>(blockIdx.x) / args.parts;
  const int block = (static_cast<int>(blockIdx.x) - job * args.parts) * kWarpsPerBlock +
                    static_cast<int>(threadIdx.x / 32);
  const int slot = job >> 1, which = job & 1;
  device::WaitForPrevious();
  device::LaunchNext();
  if (block >= args.blocks) return;
  const int col = block * kBlockN + 4 * lane;
  const float4 x = LoadRow4(RowPointer(args.x, args.x_type, args.x_stride, slot / args.num_chosen),
                            args.x_type, col, args.blocks * kBlockN);
  const MoeExpert& e = args.experts[args.ids[slot]];
  const float4 suh = LoadHalf4(which == 0 ? e.gate_suh : e.up_suh, col);
  TilePlace place = FindPlace(args.ids, args.num_slots, slot, lane);
  place.first_group += which * args.num_slots;
  StoreRotated(args.xh, args.blocks * 4, place, block, lane, RotateInput(x, suh, lane, false));
}

// Segment sums of gate and up, added ascending; `first` points at gate's, up's follow. Twelve loads
// in flight.
struct FewSums {
  float4 gate, up;
};
__device__ __forceinline__ float4 Add4(float4 a, float4 b) {
  return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
__device__ __forceinline__ FewSums LoadFewSums(const float* first, int num_segments, int lane) {
  constexpr int kBatch = 6;
  const float4* gate = reinterpret_cast<const float4*>(first) + lane;
  const float4* up = gate + num_segments * 32;
  FewSums sums = {};
  for (int begin = 0; begin < num_segments; begin += kBatch) {
    float4 g[kBatch], u[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int s = min(begin + i, num_segments - 1);
      g[i] = __ldcg(gate + 32 * s);
      u[i] = __ldcg(up + 32 * s);
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int s = begin + i;
      if (s < num_segments) {
        sums.gate = s == 0 ? g[i] : Add4(sums.gate, g[i]);
        sums.up = s == 0 ? u[i] : Add4(sums.up, u[i]);
      }
    }
  }
  return sums;
}

struct FewActivateArgs {
  int32_t num_slots, early_slots, num_blocks, num_segments;
  ActivationRule rule;
  const MoeExpert* experts;
  const int32_t* ids;
  const float* sums;
  uint32_t* xh_down;
};

// A warp per slot and 128 columns.
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    MoeActivateFewKernel(const __grid_constant__ FewActivateArgs args) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int job = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int slot = job / args.num_blocks, unit = job - slot * args.num_blocks;
  const bool mine = slot < args.num_slots;
  TilePlace place = {};
  GateUpScales scales = {};
  if (mine) {
    place = FindPlace(args.ids, args.num_slots, slot, lane);
    scales = LoadGateUpScales(args.experts[args.ids[slot]], unit, lane);
  }
  auto run = [&] {
    const float* gate = args.sums + ((place.first_group + place.row) * args.num_blocks + unit) * 2 *
                                        args.num_segments * kBlockN;
    const FewSums sums = LoadFewSums(gate, args.num_segments, lane);
    StoreRotated(args.xh_down, args.num_blocks * 4, place, unit, lane,
                 ActivateRow(args.rule, scales, sums.gate, sums.up, lane));
  };
  const bool early = mine && place.first_group < args.early_slots;
  if (args.early_slots > 0) {
    if (early) {
      run();
      device::FenceCopies();
      __threadfence();
    }
    __syncthreads();
  }
  device::LaunchNext();  // down finds the early half
  device::WaitForPrevious();
  if (mine && !early) run();
}

struct FewCombineArgs {
  int32_t rows, num_chosen, num_blocks, num_segments;
  const MoeExpert* experts;
  const int32_t* ids;
  const float* weights;
  const float* sums;
  const float* shared_out;
  int64_t shared_stride;
  void* out;
  int64_t out_stride;
  int32_t out_type;
};

// Rotates the experts' outputs and adds them for every row, ascending ids, then the shared expert:
// a warp per row and 128 columns. Everything but the sums is fetched before down has ended.
__global__ void __launch_bounds__(32 * kWarpsPerBlock)
    MoeCombineFewKernel(const __grid_constant__ FewCombineArgs args) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int job = static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
  const int row = job / args.num_blocks, unit = job - row * args.num_blocks;
  device::LaunchNext();
  if (row >= args.rows) {
    device::WaitForPrevious();
    return;
  }
  const int chosen = args.num_chosen, num_slots = args.rows * chosen, slot0 = row * chosen;
  const int col = unit * kBlockN + 4 * lane;
  const RowSlots slots = RankSlots(args.ids, args.weights, slot0, chosen, lane);
  float4 v[kMaxChosen], svh[kMaxChosen];
  float w[kMaxChosen];
  const float* from[kMaxChosen];
#pragma unroll
  for (int r = 0; r < kMaxChosen; ++r) {
    if (r < chosen) {
      const RowSlot at = SlotOfRank(slots, r, chosen, lane);
      w[r] = at.weight;
      svh[r] = LoadHalf4(args.experts[at.expert].down_svh, col);
      const TilePlace place = FindPlace(args.ids, num_slots, slot0 + at.slot, lane);
      from[r] = args.sums + ((place.first_group + place.row) * args.num_blocks + unit) *
                                args.num_segments * kBlockN;
    }
  }
  device::WaitForPrevious();
#pragma unroll
  for (int r = 0; r < kMaxChosen; ++r) {
    if (r < chosen) v[r] = SumSegments(from[r], args.num_segments, lane);
  }
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int r = 0; r < kMaxChosen; ++r) {
    if (r < chosen) sum = AddWeighted(sum, w[r], RotateOutput(v[r], svh[r], lane));
  }
  StoreExperts(sum, args.shared_out, args.shared_stride, args.out, args.out_stride, args.out_type,
               row, col, args.num_blocks * kBlockN);
}

size_t RoundUp(size_t bytes) {
  return (bytes + 255) / 256 * 256;
}

// Scratch behind the counters; rows are numbered by sorted position.
struct FewLayout {
  size_t xh, xh_down, gate_up, down, bytes;
};

FewLayout LayOutFew(const MoeCudaParams& p, int rows, int gate_up_segments, int down_segments) {
  FewLayout l{};
  const size_t slots = static_cast<size_t>(rows) * p.num_chosen;
  size_t at = kCudaCounterBytes;
  auto take = [&](size_t bytes) {
    const size_t offset = at;
    at += RoundUp(bytes);
    return offset;
  };
  l.xh = take(slots * 2 * (p.d / kPairK) * kPairBytes);
  l.xh_down = take(slots * (p.inner / kPairK) * kPairBytes);
  l.gate_up = take(slots * 2 * p.inner * gate_up_segments * sizeof(float));
  l.down = take(slots * p.d * down_segments * sizeof(float));
  l.bytes = at;
  return l;
}

int64_t Blocks(int64_t warps, int per_block = kWarpsPerBlock) {
  return (warps + per_block - 1) / per_block;
}

CudaStatus LaunchError(const char* what, int error) {
  return CudaError(error, "moe %s: %s", what, cudaGetErrorString(static_cast<cudaError_t>(error)));
}

// Everything that the two products differ in.
struct FewProduct {
  int bits, k, n, num_segments;
  bool down;
  const void* xh;
  float* sums;
  uint32_t* counters;
};

int64_t MostTasks(const MoeCudaParams& p, const FewProduct& product) {
  return int64_t{std::min(p.num_experts, p.rows * p.num_chosen)} * (product.n / kBlockN) *
         (product.down ? 1 : 2) * product.num_segments;
}
bool IsDealt(const MoeCudaParams& p, const CudaDevice& device, const FewProduct& product) {
  return MostTasks(p, product) < int64_t{kDealtTasks} * device.num_sms;
}

CudaStatus LaunchProduct(const MoeCudaParams& p,
                         const CudaDevice& device,
                         const FewProduct& product,
                         int early_slots,
                         void* stream) {
  const int slots = p.rows * p.num_chosen;
  const int groups = p.codebook == kCodebookMul1 ? FewGroups((p.rows + kGroupRows - 1) / kGroupRows)
                                                 : FewGroups(kMaxMoeSmallRows / kGroupRows);
  GemmArgs cut{};
  cut.pairs = product.k / kPairK;
  cut.num_segments = product.num_segments;
  if (CudaStatus status = FinishArgs(&cut); !status.ok()) return status;
  MoeFewArgs args{};
  args.down = product.down;
  args.num_slots = slots;
  args.early_slots = early_slots;
  args.pairs = cut.pairs;
  args.num_segments = cut.num_segments;
  args.num_blocks = product.n / kBlockN;
  args.by_segments = cut.by_segments;
  args.by_blocks = MakeDivisor(args.num_blocks);
  std::copy_n(cut.segment_begin, kMaxSegments + 1, args.segment_begin);
  const int whiches = product.down ? 1 : 2;
  args.row_stride = args.num_blocks * whiches * args.num_segments * kBlockN;
  args.which_groups = slots;
  args.experts = p.experts;
  args.ids = p.ids;
  args.xh = product.xh;
  args.sums = product.sums;
  args.counters = product.counters;
  // As many blocks on an SM as registers allow, exactly: the shared memory keeps more away, so that
  // every SM gets as many; a small kernel's blocks find room beside them.
  constexpr size_t kSpare = 4096, kDriver = 1024;
  const size_t stage = static_cast<size_t>(kFewStagePairs) *
                       (2 * 8 * kTileBytesPerBit * product.bits + groups * kPairBytes);
  const size_t fixed = kFewHeaderBytes + FewRouteBytes(slots);
  size_t stages = 0, blocks = static_cast<size_t>(FewBlocksPerSm(groups)) + 1;
  while (stages < (blocks > 1 ? 3 : 2)) {
    if (--blocks == 0) {
      return CudaError(-1, "moe: %d rows at K = %d need more shared memory than %zu bytes", p.rows,
                       product.bits, device.shared_bytes_per_block);
    }
    const size_t budget =
        std::min(device.shared_bytes_per_block, device.shared_bytes_per_sm / blocks - kSpare);
    stages = budget < fixed ? 0 : (budget - fixed) / stage;
  }
  args.num_stages = static_cast<int32_t>(std::min<size_t>(stages, kMaxStages));
  args.stage_bytes = static_cast<int32_t>(stage);
  args.route_offset = static_cast<int32_t>(kFewHeaderBytes + args.num_stages * stage);
  args.num_sms = std::min(device.num_sms, kFewMaxSms);
  const int grid = static_cast<int>(blocks) * device.num_sms;
  args.dealt = IsDealt(p, device, product);
  const size_t least = std::min(device.shared_bytes_per_block,
                                device.shared_bytes_per_sm / (blocks + 1) - kDriver + 128);
  const size_t shared_bytes = std::max(args.route_offset + FewRouteBytes(slots), least);
  const int error = FindMoeFew(product.bits, p.codebook, groups)(args, grid, shared_bytes, stream);
  return error == 0 ? CudaStatus{} : LaunchError(product.down ? "down" : "gate/up", error);
}

CudaStatus LaunchRotate(const MoeCudaParams& p, void* xh, void* stream) {
  FewRotateArgs args{};
  args.x = p.x;
  args.x_stride = p.x_stride;
  args.x_type = p.x_type;
  args.blocks = p.d / kBlockN;
  args.parts = static_cast<int32_t>(Blocks(args.blocks));
  args.num_slots = p.rows * p.num_chosen;
  args.num_chosen = p.num_chosen;
  args.experts = p.experts;
  args.ids = p.ids;
  args.xh = static_cast<uint32_t*>(xh);
  const cudaError_t error =
      LaunchDependent(&MoeRotateFewKernel, int64_t{2} * args.num_slots * args.parts,
                      32 * kWarpsPerBlock, 0, stream, args);
  return error == cudaSuccess ? CudaStatus{} : LaunchError("rotate", error);
}

// The sums of gate/up to the inputs of down.
CudaStatus LaunchActivate(const MoeCudaParams& p,
                          const FewProduct& gate_up,
                          void* xh_down,
                          int early_slots,
                          void* stream) {
  FewActivateArgs args{};
  args.num_slots = p.rows * p.num_chosen;
  args.early_slots = early_slots;
  args.num_blocks = p.inner / kBlockN;
  args.num_segments = gate_up.num_segments;
  args.rule = {p.limit, p.round_gate_up, p.round_activation};
  args.experts = p.experts;
  args.ids = p.ids;
  args.sums = gate_up.sums;
  args.xh_down = static_cast<uint32_t*>(xh_down);
  const cudaError_t error = LaunchDependent(
      &MoeActivateFewKernel, Blocks(int64_t{args.num_slots} * args.num_blocks, kActivateWarps),
      32 * kActivateWarps, 0, stream, args);
  return error == cudaSuccess ? CudaStatus{} : LaunchError("activate", error);
}

CudaStatus LaunchCombine(const MoeCudaParams& p, const FewProduct& down, void* stream) {
  FewCombineArgs args{};
  args.rows = p.rows;
  args.num_chosen = p.num_chosen;
  args.num_blocks = p.d / kBlockN;
  args.num_segments = down.num_segments;
  args.experts = p.experts;
  args.ids = p.ids;
  args.weights = p.weights;
  args.sums = down.sums;
  args.shared_out = p.shared_out;
  args.shared_stride = p.shared_stride;
  args.out = p.out;
  args.out_stride = p.out_stride;
  args.out_type = p.out_type;
  const cudaError_t error =
      LaunchDependent(&MoeCombineFewKernel, Blocks(int64_t{p.rows} * args.num_blocks),
                      32 * kWarpsPerBlock, 0, stream, args);
  return error == cudaSuccess ? CudaStatus{} : LaunchError("combine", error);
}

}  // namespace

namespace exl3 {

MoeFewLauncher FindMoeFew(int bits, int codebook, int groups) {
  using Find = MoeFewLauncher (*)(int codebook, int groups);
  constexpr Find kFind[] = {&MoeFewLauncherK1, &MoeFewLauncherK2, &MoeFewLauncherK3,
                            &MoeFewLauncherK4, &MoeFewLauncherK5, &MoeFewLauncherK6,
                            &MoeFewLauncherK7, &MoeFewLauncherK8};
  return kFind[bits - 1](codebook, groups);
}

}  // namespace exl3

bool IsMoeFew(const MoeCudaParams& params, int rows) {
  return rows <= kMaxMoeSmallRows && rows * params.num_chosen <= kMaxSmallSlots;
}

size_t MoeFewWorkspaceBytes(const MoeCudaParams& params,
                            int rows,
                            int gate_up_segments,
                            int down_segments) {
  return LayOutFew(params, rows, gate_up_segments, down_segments).bytes;
}

CudaStatus RunMoeFew(const MoeCudaParams& p,
                     int gate_up_segments,
                     int down_segments,
                     const CudaDevice& device,
                     const CudaWorkspace& workspace,
                     void* stream) {
  const FewLayout l = LayOutFew(p, p.rows, gate_up_segments, down_segments);
  char* scratch = static_cast<char*>(workspace.data);
  uint32_t* counters = static_cast<uint32_t*>(workspace.data);
  const FewProduct gate_up = {p.gate_up_bits,
                              p.d,
                              p.inner,
                              gate_up_segments,
                              false,
                              scratch + l.xh,
                              reinterpret_cast<float*>(scratch + l.gate_up),
                              counters};
  const FewProduct down = {p.down_bits,
                           p.inner,
                           p.d,
                           down_segments,
                           true,
                           scratch + l.xh_down,
                           reinterpret_cast<float*>(scratch + l.down),
                           counters + kFewCounters};
  // Dealt tasks are done in no order, so there is no early part.
  const int slots = p.rows * p.num_chosen;
  const int early_slots = IsDealt(p, device, gate_up) ? 0 : slots - std::min(slots / 2, kLateSlots);
  CudaStatus status = LaunchRotate(p, scratch + l.xh, stream);
  if (status.ok()) status = LaunchProduct(p, device, gate_up, early_slots, stream);
  if (status.ok()) status = LaunchActivate(p, gate_up, scratch + l.xh_down, early_slots, stream);
  if (status.ok()) status = LaunchProduct(p, device, down, early_slots, stream);
  if (status.ok()) status = LaunchCombine(p, down, stream);
  return status;
}

}  // namespace twinspark
