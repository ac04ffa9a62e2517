// EXL3 tiles to f16 fragments, in registers (EXL3 specification 1.3, 1.4, 2). Device code only.
//
// Lane l of a warp owns ring positions 8l .. 8l+7 of a tile; packed in pairs they are the A operand
// of mma.m16n8k16 for the transposed tile (rows = 16 output channels, columns = 16 input channels).
// Counted per weight for mul1, K = 3: 1.1 shifts, 1 mask, 1 multiply, 1 byte sum, 0.5 pack, 0.5
// fma; an H200 issues about 18 weights per clock and SM that way.
#pragma once

#include <cstdint>

#include <cuda_fp16.h>

namespace twinspark::exl3 {

inline constexpr int kCodebook3Inst = 0;
inline constexpr int kCodebookMcg = 1;
inline constexpr int kCodebookMul1 = 2;

inline constexpr int kTileBytesPerBit = 32;  // a tile is 32 K bytes

// Which 32-bit words of a tile hold a lane's eight states, and how far they are shifted. State j is
// the 16 bits from bit K (7 - j) of (w[word0], then w[word1], then w[word2] above it) >> shift.
struct LaneWindow {
  uint32_t word0, word1, word2;  // byte offsets inside a tile
  uint32_t shift;
};

template <int K>
__device__ __forceinline__ LaneWindow MakeLaneWindow(int lane) {
  const int end = 8 * K * (lane + 1);
  const int last = (end - 1) / 32;
  LaneWindow w;
  w.word0 = 4u * static_cast<uint32_t>(last);
  w.word1 = 4u * static_cast<uint32_t>((last + 8 * K - 1) % (8 * K));
  w.word2 = 4u * static_cast<uint32_t>((last + 8 * K - 2) % (8 * K));
  w.shift = static_cast<uint32_t>(32 * (last + 1) - end);
  return w;
}

// Words a lane reads per tile.
template <int K>
inline constexpr int kWordsPerLane = K <= 4 ? 2 : 3;

template <int K>
struct TileWords {
  uint32_t w[kWordsPerLane<K>];
};

template <int K>
__device__ __forceinline__ TileWords<K> LoadTile(const char* tile, const LaneWindow& window) {
  TileWords<K> t;
  t.w[0] = *reinterpret_cast<const uint32_t*>(tile + window.word0);
  t.w[1] = *reinterpret_cast<const uint32_t*>(tile + window.word1);
  if constexpr (K > 4) t.w[2] = *reinterpret_cast<const uint32_t*>(tile + window.word2);
  return t;
}

// Bits 8..23, by one permute.
__device__ __forceinline__ uint32_t MiddleBytes(uint32_t v) {
  return __byte_perm(v, 0, 0x4421);
}

// State j (0..7) from the aligned 96-bit stream v2:v1:v0. Whole bytes take one permute.
template <int K, int j>
__device__ __forceinline__ uint32_t StateAt(uint32_t v0, uint32_t v1, uint32_t v2) {
  constexpr int offset = K * (7 - j);
  if constexpr (offset % 32 == 8) {
    return MiddleBytes(offset < 32 ? v0 : v1);
  } else if constexpr (offset + 16 < 32) {
    return (v0 >> offset) & 0xffffu;
  } else if constexpr (offset + 16 == 32) {
    return v0 >> 16;
  } else if constexpr (offset < 32) {
    return __funnelshift_r(v0, v1, offset) & 0xffffu;
  } else if constexpr (offset + 16 < 64) {
    return (v1 >> (offset - 32)) & 0xffffu;
  } else if constexpr (offset + 16 == 64) {
    return v1 >> 16;
  } else {
    return __funnelshift_r(v1, v2, offset - 32) & 0xffffu;
  }
}

template <int K>
__device__ __forceinline__ void States(const TileWords<K>& t, uint32_t shift, uint32_t (&s)[8]) {
  if constexpr (K == 3) {
    // Two windows, 5 bits apart, serve all eight; the topmost needs no mask.
    const uint32_t low = __funnelshift_r(t.w[0], t.w[1], shift);
    const uint32_t high = __funnelshift_r(t.w[0], t.w[1], shift + 5);
    s[7] = low & 0xffffu;
    s[6] = (low >> 3) & 0xffffu;
    s[5] = (low >> 6) & 0xffffu;
    s[4] = (low >> 9) & 0xffffu;
    s[3] = (low >> 12) & 0xffffu;
    s[2] = (high >> 10) & 0xffffu;
    s[1] = (high >> 13) & 0xffffu;
    s[0] = high >> 16;
    return;
  }
  if constexpr (K == 2) {
    // Four shifts serve two states each.
    const uint32_t v = __funnelshift_r(t.w[0], t.w[1], shift);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t u = v >> (2 * i);
      s[7 - i] = u & 0xffffu;
      s[3 - i] = MiddleBytes(u);
    }
    return;
  }
  if constexpr (K == 4) {
    // The shift is 0, so whole bytes stay whole bytes.
    const uint32_t u = __funnelshift_r(t.w[0], t.w[1], 4);
    s[7] = t.w[0] & 0xffffu;
    s[5] = MiddleBytes(t.w[0]);
    s[3] = t.w[0] >> 16;
    s[6] = u & 0xffffu;
    s[4] = MiddleBytes(u);
    s[2] = u >> 16;
    s[1] = __funnelshift_r(t.w[0], t.w[1], 24) & 0xffffu;
    s[0] = __funnelshift_r(t.w[0], t.w[1], 28) & 0xffffu;
    return;
  }
  uint32_t v0, v1, v2 = 0;
  if constexpr (K == 8) {
    v0 = t.w[0];  // shift is 0
    v1 = t.w[1];
    v2 = t.w[2];
  } else if constexpr (K == 1) {
    v0 = __funnelshift_r(t.w[0], t.w[1], shift);  // 16 + 7 K <= 32
    v1 = 0;
  } else {
    v0 = __funnelshift_r(t.w[0], t.w[1], shift);
    v1 = __funnelshift_r(t.w[1], t.w[2], shift);
    if constexpr (K == 7) v2 = t.w[2] >> shift;
  }
  s[0] = StateAt<K, 0>(v0, v1, v2);
  s[1] = StateAt<K, 1>(v0, v1, v2);
  s[2] = StateAt<K, 2>(v0, v1, v2);
  s[3] = StateAt<K, 3>(v0, v1, v2);
  s[4] = StateAt<K, 4>(v0, v1, v2);
  s[5] = StateAt<K, 5>(v0, v1, v2);
  s[6] = StateAt<K, 6>(v0, v1, v2);
  s[7] = StateAt<K, 7>(v0, v1, v2);
}

__device__ __forceinline__ uint32_t HalfBits(__half2 h) {
  return *reinterpret_cast<const uint32_t*>(&h);
}
__device__ __forceinline__ __half2 AsHalf2(uint32_t bits) {
  return *reinterpret_cast<const __half2*>(&bits);
}

// Two codebook values, the first in the low half.
template <int kCodebook>
__device__ __forceinline__ uint32_t DecodePair(uint32_t s0, uint32_t s1) {
  if constexpr (kCodebook == kCodebookMul1) {
    // 0x6400 + S is the f16 number 1024 + S; one fused multiply-add rounds once.
    const uint32_t h0 = __dp4a(s0 * 0x83DCD12Du, 0x01010101u, 0x6400u);
    const uint32_t h1 = __dp4a(s1 * 0x83DCD12Du, 0x01010101u, 0x6400u);
    return HalfBits(
        __hfma2(AsHalf2(__byte_perm(h0, h1, 0x5410)), AsHalf2(0x1EEE1EEEu), AsHalf2(0xC931C931u)));
  } else {
    constexpr uint32_t multiplier = kCodebook == kCodebookMcg ? 0xCBAC1FEDu : 89226354u;
    constexpr uint32_t addend = kCodebook == kCodebookMcg ? 0u : 64248484u;
    const uint32_t x0 = ((s0 * multiplier + addend) & 0x8FFF8FFFu) ^ 0x3B603B60u;
    const uint32_t x1 = ((s1 * multiplier + addend) & 0x8FFF8FFFu) ^ 0x3B603B60u;
    return HalfBits(
        __hadd2(AsHalf2(__byte_perm(x0, x1, 0x5410)), AsHalf2(__byte_perm(x0, x1, 0x7632))));
  }
}

// The whole tile as an A fragment: ring pairs q0 q1 q2 q3 are registers A0, A2, A1, A3.
template <int K, int kCodebook>
__device__ __forceinline__ void DecodeTile(const TileWords<K>& t,
                                           uint32_t shift,
                                           uint32_t (&a)[4]) {
  uint32_t s[8];
  States<K>(t, shift, s);
  a[0] = DecodePair<kCodebook>(s[0], s[1]);
  a[2] = DecodePair<kCodebook>(s[2], s[3]);
  a[1] = DecodePair<kCodebook>(s[4], s[5]);
  a[3] = DecodePair<kCodebook>(s[6], s[7]);
}

}  // namespace twinspark::exl3
