// The router (model specification 3.10): s = sqrt(softplus(x . gate^T)), the num_chosen experts
// with the largest s + bias, weights s / (sum of the chosen s + 1e-20) * scaling_factor (not
// normalised when num_chosen is 1). All f32; replicated on every rank, so its bits must not depend
// on the number of rows.
#pragma once

#include <cstdint>

#include "kernels/launch.h"
#include "kernels/tensor_view.h"

namespace twinspark {

struct RouterParams {
  ConstTensorView x;                    // [num_rows, d], kF32 or kBf16
  ConstTensorView gate;                 // [num_experts, d], kF32 or kBf16
  const float* bias = nullptr;          // [num_experts]
  const float* image_bias = nullptr;    // [num_experts] for rows with image_mask; may be null
  const uint8_t* image_mask = nullptr;  // [num_rows], 1 inside an image span; may be null
  int num_chosen = 0;
  float scaling_factor = 1;
  TensorView ids;  // [num_rows, num_chosen], kI32: best biased score first, ties to the lower id
  TensorView weights;      // [num_rows, num_chosen], kF32, in the order of ids
  TensorView scores = {};  // [num_rows, num_experts], kF32: unbiased s; null data: not wanted
};

void RouterCpu(const RouterParams& params, const Launch& launch);

// Scratch of RouterCpu for up to `num_rows` rows.
int64_t RouterScratchBytesCpu(int64_t num_rows, int64_t d, int num_experts, int num_threads);

}  // namespace twinspark
