// The 128-point Hadamard transform of one warp: lane l holds channels 4l .. 4l+3. Butterflies run
// with increasing stride 1, 2, .. 64, every sum rounded to f32, so the bits are those of the EXL3
// specification 3.2 whatever the caller. Device code only.
#pragma once

#include <cstdint>

namespace twinspark::device {

// 1 / sqrt(128) as the format defines it (0x3DB504F3).
inline constexpr float kHadamardScale = 0.08838834613561630249f;

__device__ __forceinline__ void Hadamard128(float (&v)[4], int lane) {
  const float s0 = v[0] + v[1], d0 = v[0] - v[1];
  const float s1 = v[2] + v[3], d1 = v[2] - v[3];
  v[0] = s0 + s1;
  v[1] = d0 + d1;
  v[2] = s0 - s1;
  v[3] = d0 - d1;
#pragma unroll
  for (int mask = 1; mask < 32; mask *= 2) {
    const float sign = (lane & mask) ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, v[i], mask);
      v[i] = __fmaf_rn(v[i], sign, other);  // other + v or other - v, one rounding
    }
  }
}

}  // namespace twinspark::device
