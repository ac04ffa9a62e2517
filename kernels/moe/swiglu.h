// The expert activation (model specification 3.10): out = round(silu(min(g, limit)) *
// clamp(u, -limit, limit)), f32 before the store. The clamp comes before silu.
#pragma once

#include "kernels/launch.h"
#include "kernels/tensor_view.h"

namespace twinspark {

struct SwiGluParams {
  ConstTensorView gate;  // [num_rows, n], kF32 or kBf16: w1 x
  ConstTensorView up;    // [num_rows, n], same dtype: w3 x
  float limit = 0;
  TensorView out;  // [num_rows, n], kF32 or kBf16
};

void SwiGluCpu(const SwiGluParams& params, const Launch& launch);

}  // namespace twinspark
