// Decoding ahead of the wait. Weights do not depend on the previous kernel, so a block decodes its
// first stages while it waits for it, on an SM that is idle or busy with a block of the launch
// before. Decoded tiles wait as fragments, 16 bytes a lane, in registers (the first pairs) and in
// shared memory ([pair][tile row][warp][column]); every lane reads what it wrote, so there is no
// order between threads to keep. Products and their order are those of exl3_gemm_cuda.cuh.
#pragma once

#include "kernels/exl3/exl3_gemm_cuda.cuh"

namespace twinspark::exl3 {

inline constexpr int kTwoPairs = 2;  // decoded at a time

struct AheadHeader : SharedHeader {
  uint64_t early[kMaxAheadStages];  // weights of stages that are decoded ahead, inputs streamed
};
static_assert(sizeof(AheadHeader) <= kSharedHeaderBytes);

// One thread, before the block meets.
__device__ __forceinline__ void InitAhead(const GemmArgs& args, AheadHeader* header) {
  for (int i = 0; i < args.ahead_stages; ++i)
    device::BarrierInit(device::SharedAddress(&header->early[i]), 1);
}

template <bool kClusters, int U, int NT>
inline constexpr bool kDecodesAhead = DecodesAhead(kClusters, U, NT);
template <int U, int NT>
inline constexpr int kKeptPairs = KeptPairs(U, NT);

// Decoded tiles that stay in registers.
template <int TC, int NT, int U>
struct KeptTiles {
  static constexpr int kPairs = kKeptPairs<U, NT>;
  uint32_t a[kPairs][TC][2][4];
};

// Where a lane's part of a decoded tile waits; c and r are multiples of 512 bytes and a tile row.
template <int U>
__device__ __forceinline__ uint32_t DecodedTile(uint32_t ahead, int pair, int r, int c) {
  return ahead + static_cast<uint32_t>(((2 * pair + r) * 8 * U + c) * 512);
}

// Where the lane's decoded tiles begin.
template <int TC>
__device__ __forceinline__ uint32_t AheadAddress(const GemmArgs& args, uint32_t shared) {
  return shared + static_cast<uint32_t>(args.ahead_offset) + threadIdx.x / 32 * (TC * 512) +
         (threadIdx.x & 31) * 16;
}

// Decodes the first args.ahead_stages stages; returns how many. Resident inputs: gives the stages
// back, `ring` goes on behind them. Streamed inputs: they stay, because their inputs will lie
// beside them.
template <int K, int TC, int NT, int U>
__device__ __forceinline__ int DecodeAhead(const GemmArgs& args,
                                           AheadHeader* header,
                                           uint32_t ring_base,
                                           const LaneWindow& window,
                                           Ring& ring,
                                           KeptTiles<TC, NT, U>& kept) {
  constexpr int kStagePairs = kStagePairsOf<NT>, kKept = KeptTiles<TC, NT, U>::kPairs;
  static_assert(kStagePairs == 4 && (kKept == kStagePairs || kKept == kTwoPairs));
  constexpr uint32_t kTwoPairsBytes = kTwoPairs * 2 * 8 * kTileBytesPerBit * K;
  const uint32_t barriers = device::SharedAddress(header);
  uint32_t early = device::SharedAddress(&header->early[0]);
  uint32_t to = AheadAddress<TC>(args, barriers);
  const bool resident = args.resident != 0;
  Ring at = ring;
  int stages = 0;
#pragma unroll 1
  for (; stages < args.ahead_stages; ++stages) {
    device::BarrierWait(resident ? at.barrier : early, resident ? at.parity : 0);
    StageAddress from = Address<kStagePairs, K, TC, U>(at, window, false, 0);
    int pair = 0;
    if (stages == 0) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        DecodePairOfTiles<K, kCodebookMul1, TC>(from, i, window.shift, kept.a[i]);
#pragma unroll
        for (int c = 0; c < TC; ++c) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            // Decoded here and not where it is used.
            asm volatile(""
                         : "+r"(kept.a[i][c][r][0]), "+r"(kept.a[i][c][r][1]),
                           "+r"(kept.a[i][c][r][2]), "+r"(kept.a[i][c][r][3]));
          }
        }
      }
      pair = kKept;
      from.word0 += kKept / kTwoPairs * kTwoPairsBytes;
      from.word1 += kKept / kTwoPairs * kTwoPairsBytes;
      from.word2 += kKept / kTwoPairs * kTwoPairsBytes;
    }
#pragma unroll 1
    for (; pair < kStagePairs; pair += kTwoPairs) {
#pragma unroll
      for (int i = 0; i < kTwoPairs; ++i) {
        uint32_t a[TC][2][4];
        DecodePairOfTiles<K, kCodebookMul1, TC>(from, i, window.shift, a);
#pragma unroll
        for (int c = 0; c < TC; ++c) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            device::StoreShared(DecodedTile<U>(to, i, r, c),
                                make_uint4(a[c][r][0], a[c][r][1], a[c][r][2], a[c][r][3]));
          }
        }
      }
      to = DecodedTile<U>(to, kTwoPairs, 0, 0);
      from.word0 += kTwoPairsBytes;
      from.word1 += kTwoPairsBytes;
      from.word2 += kTwoPairsBytes;
    }
    if (resident) {
      Release(args, at, ring_base, barriers);
    } else {
      at.data += static_cast<uint32_t>(args.stage_bytes);
      early += 8;
    }
  }
  if (resident) ring = at;
  return stages;
}

// Their products; the first of a segment.
template <int K, int TC, int NT, int U>
__device__ __forceinline__ void MultiplyAhead(const GemmArgs& args,
                                              int stages,
                                              uint32_t pair_inputs,
                                              uint32_t barriers,
                                              uint32_t ring_base,
                                              const KeptTiles<TC, NT, U>& kept,
                                              uint32_t& next_resident,
                                              Ring& ring,
                                              float (&acc)[TC][NT][4]) {
  constexpr int kStagePairs = kStagePairsOf<NT>, kKept = KeptTiles<TC, NT, U>::kPairs;
  constexpr uint32_t kStageWeights = U * 2 * kStagePairs * (8 * kTileBytesPerBit * K);
  const bool resident = args.resident != 0;
  uint32_t from = AheadAddress<TC>(args, barriers);
#pragma unroll 1
  for (int s = 0; s < stages; ++s) {
    uint32_t b = next_resident;
    if (!resident) {
      device::BarrierWait(ring.barrier, ring.parity);
      b = ring.data + kStageWeights + (threadIdx.x & 31) * 16;
    }
    int pair = 0;
    if (s == 0) {
#pragma unroll
      for (int i = 0; i < kKept; ++i) {
        MultiplyDecoded<TC, NT, NT>(kept.a[i], b, acc);
        b += pair_inputs;
      }
      pair = kKept;
    }
#pragma unroll 1
    for (; pair < kStagePairs; pair += kTwoPairs) {
#pragma unroll
      for (int i = 0; i < kTwoPairs; ++i) {
        uint32_t a[TC][2][4];
#pragma unroll
        for (int c = 0; c < TC; ++c) {
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            const uint4 v = device::LoadShared128(DecodedTile<U>(from, i, r, c));
            a[c][r][0] = v.x;
            a[c][r][1] = v.y;
            a[c][r][2] = v.z;
            a[c][r][3] = v.w;
          }
        }
        MultiplyDecoded<TC, NT, NT>(a, b, acc);
        b += pair_inputs;
      }
      from = DecodedTile<U>(from, kTwoPairs, 0, 0);
    }
    next_resident += kStagePairs * pair_inputs;
    if (!resident) Release(args, ring, ring_base, barriers);
  }
}

// The products of a task that is one segment, whose first `ahead` stages were decoded ahead.
template <int K, int TC, int NT, int U>
__device__ __forceinline__ void MultiplySegment(const GemmArgs& args,
                                                const Task& task,
                                                int ahead,
                                                uint32_t barriers,
                                                uint32_t ring_base,
                                                uint32_t resident_b,
                                                const LaneWindow& window,
                                                const KeptTiles<TC, NT, U>& kept,
                                                Ring& ring,
                                                float (&acc)[TC][NT][4]) {
  constexpr int kStagePairs = kStagePairsOf<NT>;
#pragma unroll
  for (int c = 0; c < TC; ++c) {
#pragma unroll
    for (int g = 0; g < NT; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        acc[c][g][i] = 0.0f;
    }
  }
  const uint32_t pair_inputs =
      NT == 1 ? kPairBytes : static_cast<uint32_t>(task.num_groups) * kPairBytes;
  uint32_t next_resident = resident_b + (threadIdx.x & 31) * 16;
  if (ahead > 0) {
    MultiplyAhead<K, TC, NT, U>(args, ahead, pair_inputs, barriers, ring_base, kept, next_resident,
                                ring, acc);
  }
  const int left = SegmentBegin(args, task.segment_end) - SegmentBegin(args, task.segment_begin) -
                   ahead * kStagePairs;
  MultiplyRun<K, kCodebookMul1, TC, NT, kStagePairs, U>(args, left, task.num_groups, pair_inputs,
                                                        barriers, ring_base, window, next_resident,
                                                        ring, acc);
}

}  // namespace twinspark::exl3
