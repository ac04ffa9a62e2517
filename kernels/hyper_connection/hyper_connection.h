// Residual streams and their mixes (model specification 3.2, 3.3). Streams are [num_rows,
// num_streams * d], stream-major: column c * d + j. Everything is computed in f32; rounding happens
// only where a result is stored (dtype of the view).
#pragma once

#include "kernels/launch.h"
#include "kernels/tensor_view.h"

namespace twinspark {

inline constexpr int kMaxStreams = 8;

// collapsed = round(sum_c pre[c] * streams[c]), rounded to the dtype of `streams`, in stream order;
// out = round(RMSNorm(collapsed)).
struct CollapseNormParams {
  ConstTensorView streams;  // [num_rows, num_streams * d], kF32 or kBf16
  ConstTensorView pre;      // [num_rows, num_streams], kF32
  ConstTensorView weight;   // [1, d], kF32
  float eps = 0;
  TensorView out;             // [num_rows, d], kF32 or kBf16
  TensorView collapsed = {};  // [num_rows, d] in the dtype of streams, or null data
};

// The three mixes of a sublayer from the streams that enter it: m = (fn . v) * rsqrt(mean(v^2) +
// norm_eps), then sigmoids and Sinkhorn rounds (columns first; sinkhorn_iters counts that first
// half round too). comb[i * C + j] leads from stream i to stream j.
struct HcMixParams {
  ConstTensorView streams;  // [num_rows, C * d], kF32 or kBf16
  ConstTensorView fn;       // [2 * C + C * C, C * d], kF32: rows pre, post, comb (row-major)
  ConstTensorView base;     // [1, 2 * C + C * C], kF32
  ConstTensorView scale;    // [1, 3], kF32
  int sinkhorn_iters = 0;
  float norm_eps = 0;
  float hc_eps = 0;
  TensorView pre;   // [num_rows, C], kF32
  TensorView post;  // [num_rows, C], kF32
  TensorView comb;  // [num_rows, C * C], kF32
};

// out[j] = round(post[j] * y + sum_i comb[i][j] * streams[i]), i ascending.
struct HcPostParams {
  ConstTensorView y;        // [num_rows, d], kF32 or kBf16
  ConstTensorView streams;  // [num_rows, C * d], kF32 or kBf16
  ConstTensorView post;     // [num_rows, C], kF32
  ConstTensorView comb;     // [num_rows, C * C], kF32
  TensorView out;           // [num_rows, C * d] in the dtype of streams; may be streams itself
};

// out = round(mean over streams): a tap of the draft network.
struct StreamMeanParams {
  ConstTensorView streams;  // [num_rows, num_streams * d], kF32 or kBf16
  int num_streams = 0;
  TensorView out;  // [num_rows, d], kF32 or kBf16
};

void CollapseNormCpu(const CollapseNormParams& params, const Launch& launch);
void HcMixCpu(const HcMixParams& params, const Launch& launch);
void HcPostCpu(const HcPostParams& params, const Launch& launch);
void StreamMeanCpu(const StreamMeanParams& params, const Launch& launch);

}  // namespace twinspark
