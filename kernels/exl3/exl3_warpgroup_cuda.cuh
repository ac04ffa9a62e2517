// The product of a task of up to 48 rows with warpgroup instructions (compute capability 9.0): a
// decoded tile is the A operand in registers as before, the rows stand in shared memory as B, so a
// tile costs one instruction whatever the rows, which runs while the next two tiles are decoded.
// The same bits as MultiplyTask (kernels/device/wgmma_sm90.cuh).
//
// Layout of the inputs, in the places of exl3_rotate_cuda.cuh ([pair][group][512 bytes]): the 512
// bytes of 8 rows and 32 channels are four blocks of 8 channels, [8 rows][8 f16] each.
#pragma once

#include "kernels/device/wgmma_sm90.cuh"
#include "kernels/exl3/exl3_gemm_cuda.cuh"

namespace twinspark::exl3 {

// Word of a lane's first two of four channels (RotateInput) in its pair; the others follow.
__device__ __forceinline__ int WarpgroupWord(int lane, int row_in_group) {
  return (lane & 7) / 2 * 32 + row_in_group * 4 + (lane & 1) * 2;
}

template <int K>
struct TilePair {
  TileWords<K> tile[2];
};
template <int K>
__device__ __forceinline__ TilePair<K> LoadPair(const StageAddress& at, int pair) {
  constexpr uint32_t kRow = 8 * kTileBytesPerBit * K;
  TilePair<K> t;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint32_t offset = static_cast<uint32_t>(2 * pair + r) * kRow;
    t.tile[r].w[0] = device::LoadShared(at.word0 + offset);
    t.tile[r].w[1] = device::LoadShared(at.word1 + offset);
    if constexpr (K > 4) t.tile[r].w[2] = device::LoadShared(at.word2 + offset);
  }
  return t;
}

// Decodes a pair of tiles and starts their products; those of the pair before have ended on return.
template <int K, int NT>
__device__ __forceinline__ void StartPair(
    const TilePair<K>& t, uint32_t shift, uint32_t b, uint32_t (&a)[2][4], float (&sums)[4 * NT]) {
  DecodeTile<K, kCodebookMul1>(t.tile[0], shift, a[0]);
  DecodeTile<K, kCodebookMul1>(t.tile[1], shift, a[1]);
  device::WarpgroupFence();
  device::WarpgroupMma<NT>(sums, a[0], device::PlainTile<kPairBytes>(b));
  device::WarpgroupMma<NT>(sums, a[1], device::PlainTile<kPairBytes>(b + kPairBytes / 32));
  device::WarpgroupCommit();
  device::WarpgroupWait<1>();
}

// One segment, of an even number of pairs. Groups that the task has not are multiplied too, but
// never stored.
template <int K, int NT>
__device__ __forceinline__ void MultiplyWarpgroup(const GemmArgs& args,
                                                  const Task& task,
                                                  uint32_t barriers,
                                                  uint32_t ring_base,
                                                  const LaneWindow& window,
                                                  Ring& ring,
                                                  float (&acc)[1][NT][4]) {
  constexpr int kStagePairs = kStagePairsOf<NT>;
  static_assert(kStagePairs == 4);
  const uint32_t step = static_cast<uint32_t>(task.num_groups) * (kPairBytes / 16);
  float sums[4 * NT];
  uint32_t a[2][2][4];
#pragma unroll
  for (float& sum : sums)
    sum = 0.0f;
  device::PinRegisters(sums);
  uint32_t release = 0;  // the empty barrier of the stage before
  auto release_stage = [&] {
    if (release != 0) device::WarpArrive(release);
  };
  int left = SegmentBegin(args, task.segment_end) - SegmentBegin(args, task.segment_begin);
#pragma unroll 1
  for (; left > 0; left -= kStagePairs) {
    device::BarrierWait(ring.barrier, ring.parity);
    const StageAddress at = Address<kStagePairs, K, 1, 1>(ring, window, false, 0);
    const uint32_t b =
        (ring.data + 2 * kStagePairs * (8 * kTileBytesPerBit * K)) / 16;  // of the first pair
    const TilePair<K> first = LoadPair<K>(at, 0), second = LoadPair<K>(at, 1);
    StartPair<K, NT>(first, window.shift, b, a[0], sums);
    release_stage();
    if (left > 2) {
      const TilePair<K> third = LoadPair<K>(at, 2);
      StartPair<K, NT>(second, window.shift, b + step, a[1], sums);
      const TilePair<K> fourth = LoadPair<K>(at, 3);
      StartPair<K, NT>(third, window.shift, b + 2 * step, a[0], sums);
      StartPair<K, NT>(fourth, window.shift, b + 3 * step, a[1], sums);
    } else {
      StartPair<K, NT>(second, window.shift, b + step, a[1], sums);
    }
    release = ring.barrier + 8 * kMaxStages;
    ring.barrier += 8;
    ring.data += static_cast<uint32_t>(args.stage_bytes);
    if (--ring.stages_left == 0) {
      ring = {ring_base, barriers, static_cast<uint32_t>(args.num_stages), ring.parity ^ 1};
    }
  }
  device::WarpgroupWait<0>();
  device::PinRegisters(sums);
  release_stage();
#pragma unroll
  for (int g = 0; g < NT; ++g) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      acc[0][g][i] = sums[4 * g + i];
  }
}

}  // namespace twinspark::exl3
