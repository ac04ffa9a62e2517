// Input and output rotations of the EXL3 linear, one warp per 128 channels, and the layout in which
// rotated inputs wait for the tensor cores. Device code only.
//
// Rotated inputs xh of a tile (the up to 12 groups of 8 rows that share decoded weights) are stored
// [pair][group][512 bytes], so that a ring stage is one run; tiles stand one behind the other.
// Fragment layout (f16) of the 512 bytes of 8 rows and 32 channels (a "pair" of tile rows): lane
// 4 r + t of the tensor instruction's B operand finds, for row r of the group, its four words
//   {k = 2t, 2t+1}, {2t+8, 2t+9}, {16+2t, 16+2t+1}, {16+2t+8, 16+2t+9}
// side by side, so one 16-byte load feeds two instructions.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/device/hadamard.cuh"
#include "kernels/exl3/exl3_gemm_cuda.h"

namespace twinspark::exl3 {

using device::Hadamard128;
using device::kHadamardScale;

__device__ __forceinline__ float4 LoadHalf4(const void* base, int64_t index) {
  const uint2 raw = *reinterpret_cast<const uint2*>(static_cast<const __half*>(base) + index);
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
  const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
  return make_float4(a.x, a.y, b.x, b.y);
}

// Four numbers of two bytes.
__device__ __forceinline__ float4 ToFloat4(uint2 raw, int type) {
  if (type == kTypeF16) {
    const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
    const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
    return make_float4(a.x, a.y, b.x, b.y);
  }
  return make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u),
                     __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xffff0000u));
}

// Four neighbouring elements of a row; columns from `cols` on are zero (cols is a multiple of 4).
__device__ __forceinline__ float4 LoadRow4(const void* row, int type, int col, int cols) {
  if (col >= cols) return make_float4(0, 0, 0, 0);
  if (type == kTypeF32)
    return *reinterpret_cast<const float4*>(static_cast<const float*>(row) + col);
  return ToFloat4(*reinterpret_cast<const uint2*>(static_cast<const __half*>(row) + col), type);
}

__device__ __forceinline__ float RoundBf16(float v) {
  return __bfloat162float(__float2bfloat16_rn(v));
}

// v = x * suh of the lane's four channels -> two packed f16 words of xh.
__device__ __forceinline__ uint2 RotateInput(float4 x, float4 suh, int lane, bool upstream) {
  float v[4] = {x.x * suh.x, x.y * suh.y, x.z * suh.z, x.w * suh.w};
  if (upstream) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      v[i] = __half2float(__float2half_rn(v[i]));
  }
  Hadamard128(v, lane);
  const __half2 low = __floats2half2_rn(v[0] * kHadamardScale, v[1] * kHadamardScale);
  const __half2 high = __floats2half2_rn(v[2] * kHadamardScale, v[3] * kHadamardScale);
  return make_uint2(*reinterpret_cast<const uint32_t*>(&low),
                    *reinterpret_cast<const uint32_t*>(&high));
}

// Index of the lane's first word inside its pair's 128 words; the second is 4 further. Lane l holds
// channels 4l .. 4l+3 of a 128-block, which lie in pair l / 8 of the block.
__device__ __forceinline__ int FragmentWord(int lane, int row_in_group) {
  const int t = (2 * lane) & 3;  // of the first of the two channel couples
  const int word = ((lane >> 2) & 1) * 2 + ((lane >> 1) & 1);
  return (4 * row_in_group + t) * 4 + word;
}

// A row inside a buffer of rotated inputs.
struct TilePlace {
  int64_t first_group;  // groups before the tile
  int32_t num_groups;   // of the tile
  int32_t row;          // in the tile
};

// Stores the lane's part of one rotated 128-block. Lanes l and l ^ 2 hold the two halves of the
// same two fragment words; they swap one each, so that a warp writes whole runs of 64 bytes at
// once.
__device__ __forceinline__ void StoreRotated(
    uint32_t* xh, int pairs, const TilePlace& place, int block, int lane, uint2 words) {
  const bool upper = (lane & 2) != 0;
  const uint32_t other = __shfl_xor_sync(0xffffffffu, upper ? words.x : words.y, 2);
  const uint2 mine = upper ? make_uint2(other, words.y) : make_uint2(words.x, other);
  const int t = ((2 * lane) & 3) + (upper ? 1 : 0);
  uint32_t* out =
      xh +
      (place.first_group * pairs + static_cast<int64_t>(block * 4 + lane / 8) * place.num_groups +
       place.row / kGroupRows) *
          128 +
      (4 * (place.row % kGroupRows) + t) * 4 + ((lane >> 2) & 1) * 2;
  *reinterpret_cast<uint2*>(out) = mine;
}

// Four 128-blocks at once, for many rows: lane l holds channels 16 (l % 8) .. + 15 of block l / 8,
// so four of the seven butterflies need no exchange. The same bits as RotateInput. x and suh point
// at the lane's 16 channels (16-byte aligned).
struct Rotated16 {
  uint32_t words[8];  // f16 couples, ascending channels
};

__device__ __forceinline__ void Load16(const void* p, int type, float (&v)[16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float4 x;
    if (type == kTypeF32) {
      x = *(static_cast<const float4*>(p) + i);
    } else {
      const uint2 raw = *(static_cast<const uint2*>(p) + i);
      if (type == kTypeF16) {
        const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&raw.x));
        const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&raw.y));
        x = make_float4(a.x, a.y, b.x, b.y);
      } else {
        x = make_float4(__uint_as_float(raw.x << 16), __uint_as_float(raw.x & 0xffff0000u),
                        __uint_as_float(raw.y << 16), __uint_as_float(raw.y & 0xffff0000u));
      }
    }
    v[4 * i] = x.x;
    v[4 * i + 1] = x.y;
    v[4 * i + 2] = x.z;
    v[4 * i + 3] = x.w;
  }
}

// v: x * suh of the lane's 16 channels. Lanes of one 128-block differ in bits kShift .. kShift + 2
// of their number.
template <int kShift>
__device__ __forceinline__ Rotated16 RotateScaled16(float (&v)[16], int lane, bool upstream) {
  if (upstream) {
#pragma unroll
    for (int i = 0; i < 16; ++i)
      v[i] = __half2float(__float2half_rn(v[i]));
  }
#pragma unroll
  for (int h = 1; h < 16; h *= 2) {
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if ((i & h) == 0) {
        const float a = v[i], b = v[i + h];
        v[i] = a + b;
        v[i + h] = a - b;
      }
    }
  }
#pragma unroll
  for (int mask = 1 << kShift; mask < 8 << kShift; mask *= 2) {
    const float sign = (lane & mask) ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      v[i] = __fmaf_rn(v[i], sign, __shfl_xor_sync(0xffffffffu, v[i], mask));
    }
  }
  Rotated16 out;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const __half2 h = __floats2half2_rn(v[2 * i] * kHadamardScale, v[2 * i + 1] * kHadamardScale);
    out.words[i] = *reinterpret_cast<const uint32_t*>(&h);
  }
  return out;
}

__device__ __forceinline__ Rotated16 RotateInput16(float (&v)[16], const void* suh, int lane) {
  float scale[16];
  Load16(suh, kTypeF16, scale);
#pragma unroll
  for (int i = 0; i < 16; ++i)
    v[i] *= scale[i];
  return RotateScaled16<0>(v, lane, false);
}

// The 32 bytes of fragments that a lane stores of its 16 channels: it holds one of the two tile
// rows of a pair, its neighbour (the lowest of the three bits flipped) the other; they swap halves.
struct Fragments16 {
  uint4 v[2];
};
template <int kShift>
__device__ __forceinline__ Fragments16 SwapHalves(const Rotated16& r, int lane) {
  const bool odd = ((lane >> kShift) & 1) != 0;
  // words[t] and words[t + 4] belong to fragment lane t; the even lane keeps t = 0, 1, the odd
  // 2, 3.
  uint32_t mine[4], other[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int t = i & 1, high = (i >> 1) * 4;
    const uint32_t keep = odd ? r.words[2 + t + high] : r.words[t + high];
    const uint32_t give = odd ? r.words[t + high] : r.words[2 + t + high];
    mine[i] = keep;
    other[i] = __shfl_xor_sync(0xffffffffu, give, 1 << kShift);
  }
  Fragments16 out;
#pragma unroll
  for (int t = 0; t < 2; ++t) {
    out.v[t] = odd ? make_uint4(other[t], other[t + 2], mine[t], mine[t + 2])
                   : make_uint4(mine[t], mine[t + 2], other[t], other[t + 2]);
  }
  return out;
}

__device__ __forceinline__ void StoreRotated16(uint32_t* xh,
                                               int pairs,
                                               const TilePlace& place,
                                               int block,
                                               int lane,
                                               const Rotated16& r,
                                               bool valid) {
  const Fragments16 fragments = SwapHalves<0>(r, lane);
  if (!valid) return;
  uint32_t* out = xh +
                  (place.first_group * pairs +
                   static_cast<int64_t>(block * 4 + (lane & 7) / 2) * place.num_groups +
                   place.row / kGroupRows) *
                      128 +
                  (4 * (place.row % kGroupRows) + (lane & 1) * 2) * 4;
  *reinterpret_cast<uint4*>(out) = fragments.v[0];
  *(reinterpret_cast<uint4*>(out) + 1) = fragments.v[1];
}

// z of the lane's four outputs -> y, still f32: Hadamard, scale, svh.
__device__ __forceinline__ float4 RotateOutput(float4 z, float4 svh, int lane) {
  float v[4] = {z.x, z.y, z.z, z.w};
  Hadamard128(v, lane);
  return make_float4(v[0] * kHadamardScale * svh.x, v[1] * kHadamardScale * svh.y,
                     v[2] * kHadamardScale * svh.z, v[3] * kHadamardScale * svh.w);
}

// Four neighbouring outputs of a row, rounded to its type; columns from `cols` on are dropped.
__device__ __forceinline__ void StoreRow4(void* row, int type, int col, int cols, float4 v) {
  if (col >= cols) return;
  if (type == kTypeF32) {
    *reinterpret_cast<float4*>(static_cast<float*>(row) + col) = v;
  } else if (type == kTypeF16) {
    const __half2 a = __floats2half2_rn(v.x, v.y), b = __floats2half2_rn(v.z, v.w);
    *reinterpret_cast<uint2*>(static_cast<__half*>(row) + col) =
        make_uint2(*reinterpret_cast<const uint32_t*>(&a), *reinterpret_cast<const uint32_t*>(&b));
  } else {
    const __nv_bfloat162 a = __floats2bfloat162_rn(v.x, v.y), b = __floats2bfloat162_rn(v.z, v.w);
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(row) + col) =
        make_uint2(*reinterpret_cast<const uint32_t*>(&a), *reinterpret_cast<const uint32_t*>(&b));
  }
}

__device__ __forceinline__ const char* RowPointer(const void* base,
                                                  int type,
                                                  int64_t stride,
                                                  int64_t row) {
  return static_cast<const char*>(base) + row * stride * (type == kTypeF32 ? 4 : 2);
}

// Sum over segments of the lane's four outputs, ascending; `first` points at segment 0.
__device__ __forceinline__ float4 SumSegments(const float* first, int num_segments, int lane) {
  const float4* p = reinterpret_cast<const float4*>(first) + lane;
  float4 sum = __ldcg(p);
#pragma unroll 8
  for (int s = 1; s < num_segments; ++s) {
    const float4 v = __ldcg(p + 32 * s);
    sum = make_float4(sum.x + v.x, sum.y + v.y, sum.z + v.z, sum.w + v.w);
  }
  return sum;
}

// The matrix of a unit (a 128-output block of a launch).
__device__ __forceinline__ int MatrixOfUnit(const GemmArgs& args, int unit) {
  int i = 0;
  while (i + 1 < args.num_matrices && unit >= args.matrices[i + 1].first_unit)
    ++i;
  return i;
}

// Finishes one row of one 128-output block of a linear.
__device__ __forceinline__ void FinishLinearRow(const GemmArgs& args,
                                                const GemmMatrix& matrix,
                                                int block,
                                                int row,
                                                float4 z,
                                                float4 svh,
                                                int lane) {
  const int col = block * kBlockN + 4 * lane;
  float4 y = RotateOutput(z, svh, lane);
  if (matrix.bias != nullptr) {
    const float4 bias = LoadHalf4(matrix.bias, col);
    y = make_float4(y.x + bias.x, y.y + bias.y, y.z + bias.z, y.w + bias.w);
  }
  char* out = static_cast<char*>(matrix.y) +
              static_cast<int64_t>(row) * matrix.y_stride * (args.y_type == kTypeF32 ? 4 : 2);
  StoreRow4(out, args.y_type, col, matrix.y_cols, y);
}

}  // namespace twinspark::exl3
