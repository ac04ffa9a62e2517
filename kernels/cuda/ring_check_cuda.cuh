// The ring of the product kernels with nothing around it, in several forms, to see what racecheck
// makes of each: a producer thread fills stages of shared memory, warps read them, `full` and
// `empty` barriers of every stage separate the two. device_check --ring; what it shows is in
// README.md.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/gpu_test_util_cuda.cuh"
#include "kernels/device/ptx.cuh"

namespace twinspark::gpu_test {

enum class RingForm {
  kLaneZero,   // as the product kernels: bulk copies; lane 0 gives a stage back for its warp
  kStores,     // the same, but the producer fills stages with ordinary stores
  kEveryLane,  // bulk copies; every lane gives a stage back for itself
  kTooEarly,   // wrong on purpose: as before, but given back before it is read
};

inline constexpr int kRingWarps = 2, kRingStages = 2, kRingStageBytes = 512 * kRingWarps;
inline constexpr int kRingThreads = 32 * (kRingWarps + 1);

// Every reading lane adds up its 16 bytes of all stages. `in`: [blocks][steps][kRingStageBytes].
template <RingForm kForm>
__global__ void RingKernel(const uint4* in, int steps, uint32_t* out) {
  __shared__ __align__(128) uint8_t data[kRingStages][kRingStageBytes];
  __shared__ uint64_t full[kRingStages], empty[kRingStages];
  constexpr int kUnits = kRingStageBytes / 16;
  constexpr bool kEvery = kForm == RingForm::kEveryLane || kForm == RingForm::kTooEarly;
  const int lane = static_cast<int>(threadIdx.x & 31);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kRingStages; ++i) {
      device::BarrierInit(device::SharedAddress(&full[i]), 1);
      device::BarrierInit(device::SharedAddress(&empty[i]), kEvery ? 32 * kRingWarps : kRingWarps);
    }
    device::FenceBarrierInit();
  }
  __syncthreads();
  const uint4* mine = in + static_cast<int64_t>(blockIdx.x) * steps * kUnits;
  if (threadIdx.x >= 32 * kRingWarps) {
    if (lane != 0) return;
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const int stage = step % kRingStages;
      const uint32_t parity = static_cast<uint32_t>(step / kRingStages & 1) ^ 1;
      const uint32_t to = device::SharedAddress(data[stage]);
      const uint32_t ready = device::SharedAddress(&full[stage]);
      device::BarrierWait(device::SharedAddress(&empty[stage]), parity);
      if (kForm == RingForm::kStores) {
        for (int i = 0; i < kUnits; ++i)
          device::StoreShared(to + 16 * static_cast<uint32_t>(i), mine[step * kUnits + i]);
        device::BarrierArrive(ready);
      } else {
        device::BarrierArriveExpect(ready, kRingStageBytes);
        device::BulkCopy(to, mine + step * kUnits, kRingStageBytes, ready);
      }
    }
    return;
  }
  uint32_t sum = 0;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int stage = step % kRingStages;
    device::BarrierWait(device::SharedAddress(&full[stage]),
                        static_cast<uint32_t>(step / kRingStages & 1));
    if (kForm == RingForm::kTooEarly) device::BarrierArrive(device::SharedAddress(&empty[stage]));
    const uint4 v = device::LoadShared128(device::SharedAddress(data[stage]) + threadIdx.x * 16);
    sum += v.x + v.y + v.z + v.w;
    if (kForm == RingForm::kTooEarly) continue;
    __syncwarp();
    if (kEvery || lane == 0) device::BarrierArrive(device::SharedAddress(&empty[stage]));
  }
  out[blockIdx.x * (32 * kRingWarps) + threadIdx.x] = sum;
}

// Lanes whose sum is wrong.
template <RingForm kForm>
int RunRing(int blocks, int steps) {
  const size_t lanes = 32 * kRingWarps;
  DeviceArray<uint32_t> in(static_cast<size_t>(blocks) * static_cast<size_t>(steps) * lanes * 4);
  FillBits<<<64, 256>>>(in.get(), in.size(), 7);
  DeviceArray<uint32_t> out(static_cast<size_t>(blocks) * lanes);
  RingKernel<kForm><<<static_cast<unsigned>(blocks), kRingThreads>>>(
      reinterpret_cast<const uint4*>(in.get()), steps, out.get());
  GPU_CHECK(cudaGetLastError());
  const std::vector<uint32_t> words = in.ToHost(), got = out.ToHost();
  int wrong = 0;
  for (size_t block = 0; block < static_cast<size_t>(blocks); ++block) {
    for (size_t lane = 0; lane < lanes; ++lane) {
      uint32_t sum = 0;
      for (size_t step = 0; step < static_cast<size_t>(steps); ++step) {
        for (size_t i = 0; i < 4; ++i)
          sum += words[((block * static_cast<size_t>(steps) + step) * lanes + lane) * 4 + i];
      }
      wrong += sum != got[block * lanes + lane];
    }
  }
  return wrong;
}

}  // namespace twinspark::gpu_test
