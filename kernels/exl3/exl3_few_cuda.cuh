// Kernels for up to 48 rows of linears beside those of exl3_gemm_cuda.cuh, by tasks in rounds or in
// clusters; the bits are the same.
//
// Two blocks of outputs a task: a consumer warp decodes two columns of tiles, so eight of them
// serve 256 outputs. Inputs are rotated or streamed, and read, once for both blocks, and one block
// of threads keeps an SM almost as busy as two, with half of it free for the next launch. Warpgroup
// instructions (exl3_warpgroup_cuda.cuh): for 25 rows and more.
#pragma once

#include "kernels/exl3/exl3_cluster_cuda.cuh"
#include "kernels/exl3/exl3_warpgroup_cuda.cuh"

namespace twinspark::exl3 {

template <int K, int NT, int U, bool kWarpgroup>
__global__ void __launch_bounds__(kConsumers<U, U> + 32, kBlocksByRegisters<NT>)
    Exl3FewKernel(const __grid_constant__ GemmArgs args) {
  constexpr int TC = U;
  constexpr bool kAhead = kDecodesAhead<false, U, NT>;
  extern __shared__ __align__(128) char shared[];
  AheadHeader* header = reinterpret_cast<AheadHeader*>(shared);
  const uint32_t shared_address = device::SharedAddress(shared);
  const uint32_t ring_base = shared_address + kSharedHeaderBytes;
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.num_stages; ++i) {
      device::BarrierInit(device::SharedAddress(&header->full[i]), 1);
      device::BarrierInit(device::SharedAddress(&header->empty[i]),
                          device::kWarpArrivals * kWarps<TC, U>);
    }
    InitAhead(args, header);
    device::FenceBarrierInit();
  }
  __syncthreads();
  const int num_tasks = NumTasks(args, 0);
  if (threadIdx.x >= kConsumers<TC, U>) {
    if (threadIdx.x % 32 != 0) return;
    Produce<K, kStagePairsOf<NT>, U, kAhead>(args, nullptr, num_tasks, header,
                                             shared + kSharedHeaderBytes,
                                             device::SharedAddress(&header->early[0]));
    return;
  }
  Prefetch(args, nullptr, num_tasks);
  const LaneWindow window = MakeLaneWindow<K>(static_cast<int>(threadIdx.x & 31));
  Ring ring = {ring_base, shared_address, static_cast<uint32_t>(args.num_stages), 0};
  KeptTiles<TC, NT, U> kept;
  int ahead = 0;
  if constexpr (kAhead) {
    ahead = DecodeAhead<K, TC, NT, U>(args, header, ring_base, window, ring, kept);
  }
  device::WaitForPrevious();
  device::LaunchNext();
  for (int t = static_cast<int>(blockIdx.x); t < num_tasks; t += static_cast<int>(gridDim.x)) {
    if constexpr (kWarpgroup) {
      float acc[1][NT][4];
      MultiplyWarpgroup<K, NT>(args, MakeTask(args, nullptr, t), shared_address, ring_base, window,
                               ring, acc);
      int again = t;  // made again rather than kept: the product needs every register
      asm volatile("" : "+r"(again));
      FinishTask<1, NT, 1>(args, MakeTask(args, nullptr, again), header, nullptr,
                           reinterpret_cast<float*>(shared + args.z_offset), acc);
    } else {
      float acc[TC][NT][4];
      const bool first = kAhead && t == static_cast<int>(blockIdx.x);
      {
        const Task task = MakeTask(args, nullptr, t);
        RotateResident<TC, U>(args, task, t, shared_address);
        MultiplySegment<K, TC, NT, U>(args, task, first ? ahead : 0, shared_address, ring_base,
                                      shared_address + static_cast<uint32_t>(args.resident_offset),
                                      window, kept, ring, acc);
      }
      int again = t;
      asm volatile("" : "+r"(again));
      FinishTask<TC, NT, U>(args, MakeTask(args, nullptr, again), header, nullptr,
                            reinterpret_cast<float*>(shared + args.z_offset), acc);
    }
  }
}

template <int K, int NT, int U, bool kWarpgroup>
int LaunchFew(const GemmArgs& args, int grid, size_t shared_bytes, void* stream) {
  return LaunchProduct(&Exl3FewKernel<K, NT, U, kWarpgroup>, kConsumers<U, U> + 32, args, grid,
                       shared_bytes, stream);
}

template <int K>
GemmLauncher PickFew(int groups, TaskForm form) {
  if (form == TaskForm::kTwo) {
    return groups == 1   ? &LaunchFew<K, 1, 2, false>
           : groups == 2 ? &LaunchFew<K, 2, 2, false>
           : groups == 3 ? &LaunchFew<K, 3, 2, false>
                         : nullptr;
  }
  if (form != TaskForm::kWarpgroup) return nullptr;
  return groups == 4   ? &LaunchFew<K, 4, 1, true>
         : groups == 6 ? &LaunchFew<K, 6, 1, true>
                       : nullptr;
}

template <int K>
const void* PickClusterOfTwo(int groups) {
  switch (groups) {
    case 1:
      return ClusterKernel<K, 1, 2>();
    case 2:
      return ClusterKernel<K, 2, 2>();
    case 3:
      return ClusterKernel<K, 3, 2>();
    default:
      return nullptr;
  }
}

}  // namespace twinspark::exl3
