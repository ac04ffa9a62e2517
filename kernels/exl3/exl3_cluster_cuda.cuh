// The EXL3 product for up to 48 rows of linears in one launch, on thread-block clusters: the blocks
// that hold the segments of the same 128 outputs are resident together and reach each other's
// shared memory, so the segment sums meet there, without scratch, counter or a fence over the whole
// GPU. Decode, ring, product and order of accumulation are those of exl3_gemm_cuda.cuh.
//
// Block r of a cluster has segment r. Row i is finished by the block of segment i % S: all blocks
// send their sums of the row there; one of its warps adds them ascending and rotates the output.
// Every block has one task, of U = 1 or 2 blocks of outputs.
#pragma once

#include "kernels/exl3/exl3_ahead_cuda.cuh"
#include "kernels/exl3/exl3_gemm_cuda.cuh"

namespace twinspark::exl3 {

inline constexpr int kClusterWarps = 8;  // kWarps<1, 1>, kWarps<2, 2>

// Barrier of a cluster, behind those of the ring.
struct ClusterHeader : AheadHeader {
  uint64_t arrived;  // all sums are here
};
static_assert(sizeof(ClusterHeader) <= kSharedHeaderBytes);

// First block of outputs of this cluster.
template <int U>
__device__ __forceinline__ int ClusterUnit(const GemmArgs& args) {
  int block = static_cast<int>(blockIdx.x);
  return Divide(&block, args.by_segments) * U;
}

// Rows that the block of a segment finishes.
__device__ __forceinline__ int RowsToFinish(const GemmArgs& args, int segment) {
  int rows = args.rows + args.num_segments - 1 - segment;
  return Divide(&rows, args.by_segments);
}

// Turns a warp's fragment of 16 outputs x 8 rows (lane 4 c + q: rows 2 q, 2 q + 1 of outputs c and
// c + 8) into four neighbouring outputs of one row: bits 0, 1 and 2 of the lane give the row, bits
// 3 and 4 the outputs 8 and 4 to begin at.
__device__ __forceinline__ uint4 TransposeFragment(const float (&v)[4], int lane) {
  const bool odd = (lane & 4) != 0, high = (lane & 8) != 0;
  // Row bit against bit 0 of the output.
  const float other0 = __shfl_xor_sync(0xffffffffu, odd ? v[0] : v[1], 4);
  const float other1 = __shfl_xor_sync(0xffffffffu, odd ? v[2] : v[3], 4);
  const float a0 = odd ? other0 : v[0], a1 = odd ? v[1] : other0;  // outputs c, c + 1 (c even)
  const float b0 = odd ? other1 : v[2], b1 = odd ? v[3] : other1;  // and 8 further
  // Bit 3 of the output against its bit 1.
  const float other2 = __shfl_xor_sync(0xffffffffu, high ? a0 : b0, 8);
  const float other3 = __shfl_xor_sync(0xffffffffu, high ? a1 : b1, 8);
  return make_uint4(__float_as_uint(high ? other2 : a0), __float_as_uint(high ? other3 : a1),
                    __float_as_uint(high ? b0 : other2), __float_as_uint(high ? b1 : other3));
}

// Sends the segment's sums to the blocks that finish their rows, as messages that count their bytes
// there; the buffer there is [row][segment][U][128].
template <int TC, int NT, int U>
__device__ __forceinline__ void SendSums(const GemmArgs& args,
                                         uint32_t arrived,
                                         uint32_t buffer,
                                         int units,
                                         const float (&acc)[TC][NT][4]) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  if (U > 1 && static_cast<int>(threadIdx.x / 32) / kWarps<TC> >= units) return;
  const int first_row = 2 * (lane & 3) + ((lane >> 2) & 1);
  const uint32_t output =
      threadIdx.x / 32 * (TC * 16) + ((lane & 8) != 0 ? 8u : 0u) + ((lane & 16) != 0 ? 4u : 0u);
  const uint32_t to = buffer + device::ClusterRank() * (U * kBlockN * 4) + output * 4;
#pragma unroll
  for (int g = 0; g < NT; ++g) {
    uint4 v[TC];
#pragma unroll
    for (int c = 0; c < TC; ++c)
      v[c] = TransposeFragment(acc[c][g], lane);
    int rest = g * kGroupRows + first_row;
    if (rest >= args.rows) continue;
    const int slot = Divide(&rest, args.by_segments);
    const uint32_t rank = static_cast<uint32_t>(rest);
    const uint32_t mapped = device::MapShared(
        to + static_cast<uint32_t>(slot * args.num_segments) * (U * kBlockN * 4), rank);
    const uint32_t signal = device::MapShared(arrived, rank);
#pragma unroll
    for (int c = 0; c < TC; ++c)
      device::SendShared(mapped + static_cast<uint32_t>(c) * 64, v[c], signal);
  }
}

// Adds the segment sums of the rows that are this block's to finish, and writes them.
template <int U>
__device__ __forceinline__ void FinishRows(const GemmArgs& args,
                                           ClusterHeader* header,
                                           const char* buffer) {
  const int segment = static_cast<int>(device::ClusterRank());
  const int rows = RowsToFinish(args, segment);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int warp = static_cast<int>(threadIdx.x / 32), u = warp % U;
  int slot = warp / U;
  const int unit = ClusterUnit<U>(args);
  if (slot >= rows || u >= UnitsOf<U>(args, unit)) return;
  const GemmMatrix& m = args.matrices[MatrixOfUnit(args, unit)];
  const int block = unit + u - m.first_unit;
  const float4 svh = LoadHalf4(m.svh, block * kBlockN + 4 * lane);
  device::BarrierWaitCluster(device::SharedAddress(&header->arrived), 0);
#pragma unroll 1
  for (; slot < rows; slot += kClusterWarps / U) {
    const float4* p =
        reinterpret_cast<const float4*>(buffer) + (slot * args.num_segments * U + u) * 32 + lane;
    float4 sum = p[0];
#pragma unroll 4
    for (int s = 1; s < args.num_segments; ++s) {
      const float4 v = p[32 * U * s];
      sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    FinishLinearRow(args, m, block, slot * args.num_segments + segment, sum, svh, lane);
  }
}

template <int K, int NT, int U>
__global__ void __launch_bounds__(32 * kClusterWarps + 32, kBlocksByRegisters<NT>)
    Exl3ClusterKernel(const __grid_constant__ GemmArgs args) {
  constexpr int TC = U, kConsumerThreads = 32 * kClusterWarps;
  extern __shared__ __align__(128) char shared[];
  ClusterHeader* header = reinterpret_cast<ClusterHeader*>(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.num_stages; ++i) {
      device::BarrierInit(device::SharedAddress(&header->full[i]), 1);
      device::BarrierInit(device::SharedAddress(&header->empty[i]),
                          device::kWarpArrivals * kClusterWarps);
    }
    InitAhead(args, header);
    const uint32_t arrived = device::SharedAddress(&header->arrived);
    device::BarrierInit(arrived, 1);
    device::FenceBarrierInit();
    const int rows = RowsToFinish(args, static_cast<int>(device::ClusterRank()));
    const int units = UnitsOf<U>(args, ClusterUnit<U>(args));
    device::BarrierArriveExpect(
        arrived, static_cast<uint32_t>(rows * args.num_segments * units) * (kBlockN * 4));
  }
  __syncthreads();
  device::ClusterArrive();
  const int t = static_cast<int>(blockIdx.x), num_tasks = static_cast<int>(gridDim.x);
  if (threadIdx.x >= kConsumerThreads) {
    if (threadIdx.x % 32 != 0) return;
    Produce<K, kStagePairsOf<NT>, U, true>(args, nullptr, num_tasks, header,
                                           shared + kSharedHeaderBytes,
                                           device::SharedAddress(&header->early[0]));
    device::ClusterWait();
    return;
  }
  Prefetch(args, nullptr, num_tasks);
  const uint32_t shared_address = device::SharedAddress(shared);
  const LaneWindow window = MakeLaneWindow<K>(static_cast<int>(threadIdx.x & 31));
  device::ClusterWait();  // the others' barriers are ready
  auto wait = [] {
    device::WaitForPrevious();
    device::LaunchNext();
  };
  float acc[TC][NT][4];
  int units;
  {
    const Task task = MakeTask(args, nullptr, t);
    const uint32_t ring_base = shared_address + kSharedHeaderBytes;
    units = UnitsOf<U>(args, task.unit);
    Ring ring = {ring_base, shared_address, static_cast<uint32_t>(args.num_stages), 0};
    const uint32_t resident = shared_address + static_cast<uint32_t>(args.resident_offset);
    KeptTiles<TC, NT, U> kept;
    int ahead = 0;
    if constexpr (kDecodesAhead<true, U, NT>) {
      ahead = DecodeAhead<K, TC, NT, U>(args, header, ring_base, window, ring, kept);
    }
    if (args.resident) {
      RotateInputs(
          args, args.matrices[task.matrix], SegmentBegin(args, task.segment_begin),
          SegmentBegin(args, task.segment_end), resident, static_cast<int>(threadIdx.x / 32),
          kClusterWarps, [](uint32_t at, auto v) { device::StoreShared(at, v); }, wait);
      device::NamedBarrier(kConsumerBarrier, kConsumerThreads);
    } else {
      wait();
    }
    MultiplySegment<K, TC, NT, U>(args, task, ahead, shared_address, ring_base, resident, window,
                                  kept, ring, acc);
  }
  const uint32_t arrived = device::SharedAddress(&header->arrived);
  const uint32_t buffer = shared_address + static_cast<uint32_t>(args.z_offset);
  SendSums<TC, NT, U>(args, arrived, buffer, units, acc);
  FinishRows<U>(args, header, shared + args.z_offset);
}

template <int K, int NT, int U = 1>
const void* ClusterKernel() {
  return reinterpret_cast<const void*>(&Exl3ClusterKernel<K, NT, U>);
}

template <int K>
const void* PickCluster(int groups) {
  switch (groups) {
    case 1:
      return ClusterKernel<K, 1>();
    case 2:
      return ClusterKernel<K, 2>();
    case 3:
      return ClusterKernel<K, 3>();
    case 4:
      return ClusterKernel<K, 4>();
    case 6:
      return ClusterKernel<K, 6>();
    default:
      return nullptr;
  }
}

}  // namespace twinspark::exl3
