// RMSNorm: out = round(w * (x * rsqrt(mean(x^2) + eps))), all of it f32 before the store rounding
// (model specification 3.0). Called for every norm of the network that is not fused with a collapse
// of the residual streams (hyper_connection/collapse_norm.h).
#pragma once

#include "kernels/launch.h"
#include "kernels/tensor_view.h"

namespace twinspark {

struct RmsNormParams {
  ConstTensorView x;       // [num_rows, n], kF32 or kBf16
  ConstTensorView weight;  // [1, n], kF32
  float eps = 0;
  TensorView out;  // [num_rows, n], kF32 or kBf16; may be x itself
};

void RmsNormCpu(const RmsNormParams& params, const Launch& launch);

}  // namespace twinspark
