// Routed and shared experts of one layer (model specification 3.10, "Ours"): rows are grouped by
// expert, each expert runs its three linears once for its rows, and the outputs are summed in f32
// in ascending expert id, the shared expert last:
//   out[t] = sum_e w[t, e] * (w2_e a_e[t]) + w2_s a_s[t],   a = swiglu(w1 x, w3 x)
// With tensor parallelism w1, w3 are cut by output and w2 by input, so `out` is this rank's partial
// sum. A single rank that must give the bits of two computes both partials (num_partials = 2).
#pragma once

#include <cstdint>

#include "kernels/gemm/linear.h"
#include "kernels/launch.h"
#include "kernels/tensor_view.h"

namespace twinspark {

inline constexpr int kMaxPartials = 2;

struct ExpertWeights {
  const LinearWeights* gate = nullptr;  // w1: d -> inner
  const LinearWeights* up = nullptr;    // w3: d -> inner
  // w2: inner / num_partials -> d each; partial p reads columns [p, p + 1) * inner / num_partials.
  const LinearWeights* down[kMaxPartials] = {nullptr, nullptr};
};

struct MoeParams {
  ConstTensorView x;                       // [num_rows, d], kF32 or kBf16
  ConstTensorView ids;                     // [num_rows, num_chosen], kI32, distinct, any order
  ConstTensorView weights;                 // [num_rows, num_chosen], kF32, in the order of ids
  const ExpertWeights* experts = nullptr;  // [num_experts]
  int num_experts = 0;
  const ExpertWeights* shared = nullptr;  // null: no shared expert
  int64_t inner = 0;                      // intermediate size on this rank
  float limit = 0;                        // clamp of the activation
  DType gate_up_dtype = DType::kBf16;     // rounding of w1 x and w3 x
  DType activation_dtype = DType::kBf16;  // rounding of the activation, the input of w2
  int num_partials = 1;
  TensorView out[kMaxPartials];  // [num_rows, d], kF32
};

void MoeCpu(const MoeParams& params, const Launch& launch);

// Scratch of MoeCpu for `num_rows`, without what the linears take themselves.
int64_t MoeScratchBytesCpu(
    int64_t num_rows, int num_chosen, int64_t d, int64_t inner, int num_experts);

}  // namespace twinspark
