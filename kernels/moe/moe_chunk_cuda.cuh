// The product of large chunks on compute capability 9.0: decode tiles in registers, multiply them
// with up to 96 rows of one expert by warpgroup instructions that run while the next tile is
// decoded.
//
// A block is 16 consumer warps (four warpgroups) and one producer warp, whose warpgroup gives its
// registers to the others; a task is all inputs of one entry (rows of an expert) x 256 outputs: 128
// of gate and the same 128 of up, so that the block itself finishes the activation and its
// rotation, or 256 of down. Warp w decodes the tiles of 16 outputs as the A operand; rotated inputs
// lie in shared memory as the B operand, read by the tensor unit and not by the warps, so a tile
// costs its decode and one instruction whatever the rows. Segments, chains and their order are
// those of exl3_gemm_cuda.h. No block waits for another one.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "kernels/cuda/launch_cuda.cuh"
#include "kernels/device/ptx.cuh"
#include "kernels/device/wgmma_sm90.cuh"
#include "kernels/exl3/exl3_decode_cuda.cuh"
#include "kernels/moe/moe_chunk_cuda.h"
#include "kernels/moe/moe_rows_cuda.cuh"

namespace twinspark::exl3 {

inline constexpr int kChunkMaxStages = 8;
inline constexpr int kChunkWarps = kChunkConsumers / 32;
inline constexpr int kChunkHeaderBytes = 1024;  // full [8], empty [8], z free; tasks [8]
inline constexpr int kChunkZBarrier = 16 * kChunkMaxStages;
inline constexpr int kChunkTasksAt = kChunkZBarrier + 8;
inline constexpr int kChunkZStride = kBlockN + 4;  // floats; no bank conflicts
inline constexpr int kChunkBarrier = 1;
inline constexpr int kChunkThreads = kChunkConsumers + 128;  // registers move by warpgroup
inline constexpr int kChunkTileRows = kChunkK / 16;

// Byte of row `row` (of an entry), channel `channel` (a multiple of 4) in an entry's inputs.
__device__ __forceinline__ int64_t ChunkInputByte(int channel, int num_groups, int row) {
  const int r = row % kGroupRows;
  const int64_t atom = static_cast<int64_t>(channel / kChunkK) * num_groups + row / kGroupRows;
  const int piece = channel % kChunkK / 8;
  return atom * kChunkAtomBytes + r * 128 + ((piece ^ r) * 16 + channel % 8 * 2);
}

struct ChunkTask {
  MoeEntry entry;
  int part;  // gate and up: block; down: pair of blocks
  int num_groups;
};

__device__ __forceinline__ ChunkTask MakeChunkTask(const MoeChunkArgs& args, int t) {
  const uint32_t n = static_cast<uint32_t>(t);
  const uint32_t index = args.by_tasks.magic == 0 ? n : __umulhi(n, args.by_tasks.magic);
  ChunkTask task;
  task.part = static_cast<int>(n - index * args.by_tasks.divisor);
  task.entry = args.entries[index];
  task.num_groups = (task.entry.count + kGroupRows - 1) / kGroupRows;
  return task;
}

// One warp: takes tasks and streams their weights and inputs through the ring. `tasks` has the
// number of the task that begins in a stage, -1 after the last.
template <int K>
__device__ __forceinline__ void ProduceChunk(const MoeChunkArgs& args,
                                             int num_tasks,
                                             volatile int* tasks,
                                             uint32_t shared) {
  constexpr uint32_t kWeights = kChunkTileRows * 8 * kTileBytesPerBit * K;  // of 128 outputs
  const uint64_t policy = device::EvictFirstPolicy();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const uint32_t begin = shared + kChunkHeaderBytes;
  const uint32_t stage_bytes = static_cast<uint32_t>(args.stage_bytes);
  const uint32_t end = shared + 8 * static_cast<uint32_t>(args.num_stages);
  uint32_t full = shared, data = begin, parity = 1;
  // The first task is the block's own, the others are taken in turn: their times differ by half.
  int t = static_cast<int>(blockIdx.x);
#pragma unroll 1
  while (t < num_tasks) {
    int next = 0;
    if (lane == 0) next = static_cast<int>(gridDim.x + atomicAdd(args.counters, 1u));
    const ChunkTask task = MakeChunkTask(args, t);
    const MoeExpert& e = args.experts[task.entry.expert];
    const int64_t per_block = static_cast<int64_t>(args.steps) * kWeights;
    const uint8_t *first, *second;
    uint32_t blocks = 2;  // of 128 outputs
    if (args.down) {
      first = e.down + 2 * task.part * per_block;
      second = first + per_block;
      if (2 * task.part + 1 == args.num_blocks) blocks = 1;
    } else {
      first = e.gate + task.part * per_block;
      second = e.up + task.part * per_block;
      // Wanted when the product is done.
      if (lane < 3) {
        const void* vector = lane == 0 ? e.gate_svh : lane == 1 ? e.up_svh : e.down_suh;
        device::PrefetchL2(static_cast<const __half*>(vector) + task.part * kBlockN);
      }
    }
    first = device::Uniform(first);
    second = device::Uniform(second);
    const uint32_t input_bytes =
        device::Uniform(static_cast<uint32_t>(task.num_groups)) * kChunkAtomBytes;
    const char* inputs =
        static_cast<const char*>(args.xh) +
        static_cast<int64_t>(device::Uniform(task.entry.group)) * args.steps * kChunkAtomBytes;
    const uint32_t bytes = blocks * kWeights + (args.down ? 1 : 2) * input_bytes;
    device::BarrierWait(full + 8 * kChunkMaxStages, parity);
    if (lane == 0) tasks[(full - shared) / 8] = t;
    __syncwarp();
#pragma unroll 1
    for (int step = 0; step < args.steps; ++step) {
      device::BarrierWait(full + 8 * kChunkMaxStages, parity);
      const uint32_t to = data + static_cast<uint32_t>(args.input_offset);
      if (device::ElectOne()) {
        device::BarrierArriveExpect(full, bytes);
        device::BulkCopyEvictFirst(data, first, kWeights, full, policy);
        if (blocks == 2)
          device::BulkCopyEvictFirst(data + kWeights, second, kWeights, full, policy);
        device::BulkCopy(to, inputs, input_bytes, full);
        if (!args.down) {
          device::BulkCopy(to + static_cast<uint32_t>(args.input_bytes), inputs + args.up_offset,
                           input_bytes, full);
        }
      }
      first += kWeights;
      second += kWeights;
      inputs += input_bytes;
      full += 8;
      data += stage_bytes;
      if (full == end) {
        full = shared;
        data = begin;
        parity ^= 1;
      }
    }
    t = device::Uniform(next);
  }
  device::BarrierWait(full + 8 * kChunkMaxStages, parity);
  if (lane != 0) return;
  tasks[(full - shared) / 8] = -1;
  device::BarrierArrive(full);
  if (atomicAdd(args.counters + 1, 1u) == gridDim.x - 1) {  // nobody takes any more
    args.counters[0] = 0;
    args.counters[1] = 0;
  }
}

struct ChunkRing {
  uint32_t stage, parity;
};

inline constexpr int kChunkSums = 4 * kChunkTileGroups;  // accumulators of a thread

// What a warp needs to find its operands in a stage.
struct ChunkOperands {
  uint32_t shared;
  uint32_t word0, word1, word2;  // of its tile in the first tile row, from the stage's begin
  uint32_t inputs;
  uint32_t shift;
};

// The words of two tile rows of a warp's column.
template <int K>
struct TwoTiles {
  TileWords<K> tile[2];
};
template <int K>
__device__ __forceinline__ TwoTiles<K> LoadTwo(const ChunkOperands& from, uint32_t data, int half) {
  constexpr uint32_t kRow = 8 * kTileBytesPerBit * K;
  TwoTiles<K> t;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t at = data + (2 * half + i) * kRow;
    t.tile[i].w[0] = device::LoadShared(at + from.word0);
    t.tile[i].w[1] = device::LoadShared(at + from.word1);
    if constexpr (K > 4) t.tile[i].w[2] = device::LoadShared(at + from.word2);
  }
  return t;
}

template <int kGroups>
__device__ __forceinline__ void StartTwo(const uint32_t (&a)[2][4],
                                         uint32_t b,
                                         float (&acc)[kChunkSums]) {
  device::WarpgroupFence();
  device::WarpgroupMma<kGroups>(acc, a[0], device::SwizzledTile(b));
  device::WarpgroupMma<kGroups>(acc, a[1], device::SwizzledTile(b + 2));
  device::WarpgroupCommit();
}

// Decodes two tiles and starts their products as one group; the group before has ended on return.
// The size is chosen here and not around the loop: the compiler keeps the registers of asynchronous
// instructions of different loops apart.
template <int K>
__device__ __forceinline__ void MultiplyTwo(const TwoTiles<K>& t,
                                            uint32_t shift,
                                            int groups,
                                            uint32_t b,
                                            uint32_t (&a)[2][4],
                                            float (&acc)[kChunkSums]) {
  DecodeTile<K, kCodebookMul1>(t.tile[0], shift, a[0]);
  DecodeTile<K, kCodebookMul1>(t.tile[1], shift, a[1]);
  if (groups <= 4) {
    StartTwo<4>(a, b, acc);
  } else if (groups <= 8) {
    StartTwo<8>(a, b, acc);
  } else {
    StartTwo<12>(a, b, acc);
  }
  device::WarpgroupWait<1>();
}

// `steps` ring stages for 8 `groups` rows. Words are loaded one pair of tiles ahead.
template <int K>
__device__ __forceinline__ void MultiplySteps(const MoeChunkArgs& args,
                                              const ChunkOperands& from,
                                              int steps,
                                              int groups,
                                              ChunkRing& ring,
                                              uint32_t (&a)[2][2][4],
                                              float (&acc)[kChunkSums]) {
  uint32_t release = 0;  // the empty barrier of the stage before
  uint32_t full = from.shared + 8 * ring.stage;
  uint32_t data =
      from.shared + kChunkHeaderBytes + ring.stage * static_cast<uint32_t>(args.stage_bytes);
  device::BarrierWait(full, ring.parity);
  TwoTiles<K> first = LoadTwo<K>(from, data, 0);
#pragma unroll 1
  while (true) {
    const uint32_t b = (data + from.inputs) / 16;
    const TwoTiles<K> second = LoadTwo<K>(from, data, 1);
    MultiplyTwo<K>(first, from.shift, groups, b, a[0], acc);
    if (release != 0) device::WarpArrive(release);
    release = full + 8 * kChunkMaxStages;
    if (++ring.stage == static_cast<uint32_t>(args.num_stages)) {
      ring.stage = 0;
      ring.parity ^= 1;
    }
    --steps;
    if (steps > 0) {
      full = from.shared + 8 * ring.stage;
      data = from.shared + kChunkHeaderBytes + ring.stage * static_cast<uint32_t>(args.stage_bytes);
      device::BarrierWait(full, ring.parity);
      first = LoadTwo<K>(from, data, 0);
    }
    MultiplyTwo<K>(second, from.shift, groups, b + 4, a[1], acc);
    if (steps == 0) break;
  }
  device::WarpgroupWait<0>();
  device::PinRegisters(acc);
  device::WarpArrive(release);
}

// Multiplies a task and leaves its rows of 256 sums in z: [2][rows][kChunkZStride]. The sums of
// earlier segments lie in the same places, each thread's own. `z_free`: parity of the barrier that
// says that the rows of the task before have been read.
template <int K>
__device__ __forceinline__ void SumsOfTask(const MoeChunkArgs& args,
                                           const ChunkOperands& from,
                                           int groups,
                                           uint32_t z_free,
                                           float* z,
                                           ChunkRing& ring) {
  float acc[kChunkSums];
  uint32_t a[2][2][4];
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int warp = static_cast<int>(threadIdx.x / 32);
  float* out =
      z + warp / 8 * args.second_z + 2 * (lane & 3) * kChunkZStride + warp % 8 * 16 + lane / 4;
#pragma unroll 1
  for (int segment = 0; segment < args.num_segments; ++segment) {
#pragma unroll
    for (int i = 0; i < kChunkSums; ++i)
      acc[i] = 0.0f;
    device::PinRegisters(acc);
    const int steps = args.segment_begin[segment + 1] - args.segment_begin[segment];
    MultiplySteps<K>(args, from, steps, groups, ring, a, acc);
    if (segment == 0) device::BarrierWait(from.shared + kChunkZBarrier, z_free);
#pragma unroll
    for (int g = 0; g < kChunkTileGroups; ++g) {
      if (g >= groups) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float& sum = out[(g * kGroupRows + i % 2) * kChunkZStride + i / 2 * 8];
        sum = segment > 0 ? sum + acc[4 * g + i] : acc[4 * g + i];
      }
    }
  }
}

// Rows of z to where they go, a warp a row. Lane i has in `slot` where the warp's i-th row goes.
__device__ __forceinline__ void FinishChunkTask(
    const MoeChunkArgs& args, const ChunkTask& task, int slot, uint32_t shared, const float* z) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x & 31);
  if (args.down) {
    const int first = 2 * task.part * kBlockN + 4 * lane;
    const bool two = 2 * task.part + 1 < args.num_blocks;
    device::NamedBarrier(kChunkBarrier, kChunkConsumers);
    const int width = args.num_blocks * kBlockN;
#pragma unroll 2
    for (int i = 0; i * kChunkWarps + warp < task.entry.count; ++i) {
      const float* from = z + (i * kChunkWarps + warp) * kChunkZStride + 4 * lane;
      float* to =
          args.slot_out + static_cast<int64_t>(__shfl_sync(0xffffffffu, slot, i)) * width + first;
      *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
      if (two) {
        *reinterpret_cast<float4*>(to + kBlockN) =
            *reinterpret_cast<const float4*>(from + args.second_z);
      }
    }
  } else {
    const GateUpScales scales = LoadGateUpScales(args.experts[task.entry.expert], task.part, lane);
    const ActivationRule rule = {args.limit, args.round_gate_up != 0, args.round_activation != 0};
    char* out = static_cast<char*>(args.xh_down) +
                static_cast<int64_t>(task.entry.group) * args.down_steps * kChunkAtomBytes;
    device::NamedBarrier(kChunkBarrier, kChunkConsumers);
#pragma unroll 1
    for (int row = warp; row < task.entry.count; row += kChunkWarps) {
      const float* from = z + row * kChunkZStride + 4 * lane;
      const uint2 words = ActivateRow(rule, scales, *reinterpret_cast<const float4*>(from),
                                      *reinterpret_cast<const float4*>(from + args.second_z), lane);
      *reinterpret_cast<uint2*>(
          out + ChunkInputByte(task.part * kBlockN + 4 * lane, task.num_groups, row)) = words;
    }
  }
  device::WarpArrive(shared + kChunkZBarrier);
}

template <int K>
__global__ void __launch_bounds__(kChunkThreads, 1)
    MoeChunkKernel(const __grid_constant__ MoeChunkArgs args) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  extern __shared__ __align__(1024) char chunk_shared[];
  const uint32_t shared = device::SharedAddress(chunk_shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.num_stages; ++i) {
      device::BarrierInit(shared + 8 * i, 1);
      device::BarrierInit(shared + 8 * (kChunkMaxStages + i), device::kWarpArrivals * kChunkWarps);
    }
    device::BarrierInit(shared + kChunkZBarrier, device::kWarpArrivals * kChunkWarps);
    device::FenceBarrierInit();
  }
  device::WaitForPrevious();
  device::LaunchNext();
  __syncthreads();
  const int num_tasks = *args.num_entries * static_cast<int>(args.by_tasks.divisor);
  volatile int* tasks = reinterpret_cast<int*>(chunk_shared + kChunkTasksAt);
  if (threadIdx.x >= kChunkConsumers) {
    device::ReleaseRegisters<24>();
    if (threadIdx.x < kChunkConsumers + 32) ProduceChunk<K>(args, num_tasks, tasks, shared);
  } else {
    device::TakeRegisters<112>();
    const LaneWindow window = MakeLaneWindow<K>(static_cast<int>(threadIdx.x & 31));
    // Taken from one lane, so that the compiler knows it to be uniform.
    const uint32_t warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0);
    // Warps 8 .. 15 have the second 128 outputs.
    const uint32_t tile = (warp / 8 * kChunkTileRows * 8 + warp % 8) * kTileBytesPerBit * K;
    const ChunkOperands from = {
        shared,
        tile + window.word0,
        tile + window.word1,
        tile + window.word2,
        static_cast<uint32_t>(args.input_offset) +
            (args.down ? 0 : warp / 8 * static_cast<uint32_t>(args.input_bytes)),
        window.shift};
    float* z = reinterpret_cast<float*>(chunk_shared + args.z_offset);
    ChunkRing ring = {0, 0};
    uint32_t z_free = 1;  // at first it is
    while (true) {
      device::BarrierWait(shared + 8 * ring.stage, ring.parity);
      const int t = tasks[ring.stage];
      if (t < 0) break;
      const ChunkTask task = MakeChunkTask(args, t);
      // Lane i has the slot of the warp's i-th row: asked for long before it is used.
      const int row = static_cast<int>((threadIdx.x & 31) * kChunkWarps + threadIdx.x / 32);
      const int slot = args.down && row < task.entry.count ? args.order[task.entry.first + row] : 0;
      SumsOfTask<K>(args, from, task.num_groups, z_free, z, ring);
      FinishChunkTask(args, task, slot, shared, z);
      z_free ^= 1;
    }
  }
#else
  __trap();
#endif
}

template <int K>
int LaunchMoeChunk(const MoeChunkArgs& args, int grid, size_t shared_bytes, void* stream) {
  auto* kernel = &MoeChunkKernel<K>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return static_cast<int>(error);
  return static_cast<int>(LaunchDependent(kernel, grid, kChunkThreads, shared_bytes, stream, args));
}

}  // namespace twinspark::exl3
