// The EXL3 product for up to 48 rows of linears in one launch, on thread-block clusters: the blocks
// that hold the segments of the same 128 outputs are resident together and reach each other's
// shared memory, so the segment sums meet there, without scratch, counter or a fence over the whole
// GPU. Decode, ring, product and order of accumulation are those of exl3_gemm_cuda.cuh.
//
// Block r of a cluster has segment r % S of the cluster's outputs number r / S. If several blocks
// of outputs share a cluster (args.cluster_units > 1), those with the same segment share the
// rotation of x. Row i is finished by the block of segment i % S: all blocks send their sums of the
// row there; one of its warps adds them ascending and rotates the output. Every block has one task.
#pragma once

#include "kernels/exl3/exl3_gemm_cuda.cuh"

namespace twinspark::exl3 {

inline constexpr int kClusterWarps = kWarps<1>;

// Barriers of a cluster, behind those of the ring.
struct ClusterHeader : SharedHeader {
  uint64_t arrived;  // all sums are here
  uint64_t rotated;  // all rotated inputs are here
};
static_assert(sizeof(ClusterHeader) <= kSharedHeaderBytes);

// Up to 8 rows the sums themselves signal their arrival; more would be too many small messages, so
// plain stores and an arrival per warp, which waits for them, take their place.
template <int NT>
inline constexpr bool kSumsSignal = NT == 1;

// Where a block stands. Made anew where it is needed: the product needs every register.
struct ClusterPlace {
  int segment, unit;    // unit: of the cluster
  uint32_t first_rank;  // of the blocks with the same outputs
};
__device__ __forceinline__ ClusterPlace MakePlace(const GemmArgs& args) {
  int rank = static_cast<int>(device::ClusterRank());
  const int unit = Divide(&rank, args.by_segments);
  return {rank, unit, static_cast<uint32_t>(unit) * args.by_segments.divisor};
}

// Rows that the block of a segment finishes.
__device__ __forceinline__ int RowsToFinish(const GemmArgs& args, int segment) {
  int rows = args.rows + args.num_segments - 1 - segment;
  return Divide(&rows, args.by_segments);
}

// Brings the inputs of the task's segment into shared memory; ends with a barrier.
template <class Wait>
__device__ __forceinline__ void RotateSegment(
    const GemmArgs& args, const Task& task, ClusterHeader* header, uint32_t resident, Wait wait) {
  const int units = args.cluster_units;
  const GemmMatrix& input = args.matrices[task.matrix];
  const int begin = SegmentBegin(args, task.segment_begin);
  const int end = SegmentBegin(args, task.segment_end);
  if (units == 1) {
    RotateInputs(
        args, input, begin, end, resident, static_cast<int>(threadIdx.x / 32), kClusterWarps,
        [](uint32_t at, auto v) { device::StoreShared(at, v); }, wait);
    device::NamedBarrier(kConsumerBarrier, kConsumers<1>);
    return;
  }
  const ClusterPlace place = MakePlace(args);
  auto in_unit = [&](uint32_t at, int u) {
    return device::MapShared(at, static_cast<uint32_t>(place.segment) +
                                     static_cast<uint32_t>(u) * args.by_segments.divisor);
  };
  RotateInputs(
      args, input, begin, end, resident, static_cast<int>(threadIdx.x / 32) * units + place.unit,
      kClusterWarps * units,
      [&](uint32_t at, auto v) {
        for (int u = 0; u < units; ++u)
          device::StoreCluster(in_unit(at, u), v);
      },
      wait);
  __syncwarp();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const uint32_t rotated = device::SharedAddress(&header->rotated);
  if (lane < units) device::BarrierArriveCluster(in_unit(rotated, lane));
  device::BarrierWaitCluster(rotated, 0);
}

// Sends the segment's sums to the blocks that finish their rows.
template <int NT>
__device__ __forceinline__ void SendSums(const GemmArgs& args,
                                         ClusterHeader* header,
                                         uint32_t buffer,
                                         const float (&acc)[1][NT][4]) {
  const ClusterPlace place = MakePlace(args);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const uint32_t arrived = device::SharedAddress(&header->arrived);
  const uint32_t to = buffer + static_cast<uint32_t>(place.segment) * (kBlockN * 4) +
                      threadIdx.x / 32 * 64 + static_cast<uint32_t>(lane / 4) * 4;
#pragma unroll
  for (int g = 0; g < NT; ++g) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      int rest = g * kGroupRows + 2 * (lane & 3) + i;
      if (rest >= args.rows) continue;
      const int slot = Divide(&rest, args.by_segments);
      const uint32_t rank = place.first_rank + static_cast<uint32_t>(rest);
      const uint32_t mapped = device::MapShared(
          to + static_cast<uint32_t>(slot * args.num_segments) * (kBlockN * 4), rank);
      if constexpr (kSumsSignal<NT>) {
        const uint32_t signal = device::MapShared(arrived, rank);
        device::SendShared(mapped, acc[0][g][i], signal);
        device::SendShared(mapped + 32, acc[0][g][2 + i], signal);
      } else {
        device::StoreCluster(mapped, __float_as_uint(acc[0][g][i]));
        device::StoreCluster(mapped + 32, __float_as_uint(acc[0][g][2 + i]));
      }
    }
  }
  if constexpr (!kSumsSignal<NT>) {
    __syncwarp();
    if (lane < min(args.num_segments, args.rows)) {
      device::BarrierArriveCluster(
          device::MapShared(arrived, place.first_rank + static_cast<uint32_t>(lane)));
    }
  }
}

// Adds the segment sums of the rows that are this block's to finish, and writes them.
__device__ __forceinline__ void FinishRows(const GemmArgs& args,
                                           ClusterHeader* header,
                                           const char* buffer) {
  const int segment = MakePlace(args).segment;
  const int rows = RowsToFinish(args, segment);
  const int lane = static_cast<int>(threadIdx.x & 31);
  int slot = static_cast<int>(threadIdx.x / 32);
  if (slot >= rows) return;
  int unit = static_cast<int>(blockIdx.x);
  unit = Divide(&unit, args.by_segments);
  const GemmMatrix& m = args.matrices[MatrixOfUnit(args, unit)];
  const float4 svh = LoadHalf4(m.svh, (unit - m.first_unit) * kBlockN + 4 * lane);
  device::BarrierWaitCluster(device::SharedAddress(&header->arrived), 0);
#pragma unroll 1
  for (; slot < rows; slot += kClusterWarps) {
    const float4* p =
        reinterpret_cast<const float4*>(buffer) + slot * args.num_segments * 32 + lane;
    float4 sum = p[0];
#pragma unroll 4
    for (int s = 1; s < args.num_segments; ++s) {
      const float4 v = p[32 * s];
      sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
    }
    FinishLinearRow(args, m, unit - m.first_unit, slot * args.num_segments + segment, sum, svh,
                    lane);
  }
}

template <int K, int kCodebook, int NT>
__global__ void __launch_bounds__(kConsumers<1> + 32, kBlocksByRegisters<NT>)
    Exl3ClusterKernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(128) char shared[];
  ClusterHeader* header = reinterpret_cast<ClusterHeader*>(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.num_stages; ++i) {
      device::BarrierInit(device::SharedAddress(&header->full[i]), 1);
      device::BarrierInit(device::SharedAddress(&header->empty[i]), kClusterWarps);
    }
    const uint32_t arrived = device::SharedAddress(&header->arrived);
    device::BarrierInit(arrived, kSumsSignal<NT> ? 1 : kClusterWarps * args.by_segments.divisor);
    device::BarrierInit(device::SharedAddress(&header->rotated),
                        kClusterWarps * static_cast<uint32_t>(args.cluster_units));
    device::FenceBarrierInit();
    if (kSumsSignal<NT>) {
      const int rows = RowsToFinish(args, MakePlace(args).segment);
      device::BarrierArriveExpect(arrived,
                                  static_cast<uint32_t>(rows * args.num_segments) * (kBlockN * 4));
    }
  }
  __syncthreads();
  device::ClusterArrive();
  const int t = static_cast<int>(blockIdx.x), num_tasks = static_cast<int>(gridDim.x);
  if (threadIdx.x >= kConsumers<1>) {
    if (threadIdx.x % 32 != 0) return;
    Produce<K, kStagePairsOf<NT>>(args, nullptr, num_tasks, header, shared + kSharedHeaderBytes);
    device::ClusterWait();
    return;
  }
  Prefetch(args, nullptr, num_tasks);
  const uint32_t shared_address = device::SharedAddress(shared);
  const uint32_t resident = shared_address + static_cast<uint32_t>(args.resident_offset);
  const LaneWindow window = MakeLaneWindow<K>(static_cast<int>(threadIdx.x & 31));
  device::ClusterWait();  // the others' barriers are ready
  auto wait = [] {
    device::WaitForPrevious();
    device::LaunchNext();
  };
  float acc[1][NT][4];
  {
    const Task task = MakeTask(args, nullptr, t);
    if (args.resident) {
      RotateSegment(args, task, header, resident, wait);
    } else {
      wait();
    }
    Ring ring = {shared_address + kSharedHeaderBytes, shared_address,
                 static_cast<uint32_t>(args.num_stages), 0};
    MultiplyTask<K, kCodebook, 1, NT, kStagePairsOf<NT>>(args, task, shared_address,
                                                         shared_address + kSharedHeaderBytes,
                                                         resident, nullptr, window, ring, acc);
  }
  SendSums<NT>(args, header, shared_address + static_cast<uint32_t>(args.z_offset), acc);
  FinishRows(args, header, shared + args.z_offset);
}

template <int K, int NT>
const void* ClusterKernel() {
  return reinterpret_cast<const void*>(&Exl3ClusterKernel<K, kCodebookMul1, NT>);
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
