// Engram rows and gate (model specification 3.11).
#pragma once

#include <cstdint>

#include "kernels/launch.h"
#include "kernels/tensor_view.h"

namespace twinspark {

// out[t, i] = round(e4m3(codes[t, i]) * 2^(scales[t, i / 32] - 127)): the looked-up rows of a
// token, columns side by side. Exact in bf16 for all ordinary scales.
struct EngramDequantizeParams {
  ConstTensorView codes;   // [num_rows, columns * row_dim], kF8E4M3
  ConstTensorView scales;  // [num_rows, columns * row_dim / 32], kF8E8M0
  TensorView out;          // [num_rows, columns * row_dim], kF32 or kBf16
};

// For each stream c: n = rsqrt(mean(S[c]^2) + eps) * rsqrt(mean(key[c]^2) + eps),
// z = sum_j S[c][j] * weight[c][j] * key[c][j] * n * d^-0.5,
// g = sigmoid(copysign(sqrt(max(|z|, 1e-6)), z)), 0 where image_mask; S[c] = round(S[c] + g *
// value).
struct EngramGateParams {
  ConstTensorView streams;  // [num_rows, C * d], kF32 or kBf16
  ConstTensorView kv;       // [num_rows, (C + 1) * d], kF32 or kBf16: C keys, then the value
  ConstTensorView weight;   // [C, d], kF32: q_weight * k_weight
  float eps = 0;
  const uint8_t* image_mask = nullptr;  // [num_rows]; may be null
  TensorView out;                       // [num_rows, C * d]; may be streams itself
  TensorView gate = {};                 // [num_rows, C], kF32; null data: not wanted
};

void EngramDequantizeCpu(const EngramDequantizeParams& params, const Launch& launch);
void EngramGateCpu(const EngramGateParams& params, const Launch& launch);

}  // namespace twinspark
