// Internal to kernels/gemm: one dense matrix of a batch as the SIMD code sees it, for a block of
// rows.
#pragma once

#include <cstdint>

#include "kernels/gemm/dense_weights.h"
#include "kernels/tensor_view.h"

namespace twinspark {

inline constexpr int64_t kDenseRowBlock = 192;
inline constexpr size_t kDenseMaxDirectRows = 12;  // above, weights in pieces are cheaper
inline constexpr size_t kDensePanelSteps = 256;
inline constexpr int64_t kDenseMaxUnits = 2;  // taken at once when there is one row

// Scratch of one thread, in floats: a panel for up to 16 lanes, the sums of 32 columns.
inline constexpr int64_t kDensePanelFloats = static_cast<int64_t>(kDensePanelSteps) * 2 * 16;
inline constexpr int64_t kDenseThreadFloats = kDensePanelFloats + kDenseRowBlock * 32;

struct DenseJob {
  const DenseWeights* weights = nullptr;
  ConstTensorView x;  // the rows of this block
  TensorView y;
  const float* xf = nullptr;  // x as f32: x itself, or `widened`
  int64_t xf_stride = 0;
  float* widened = nullptr;  // arena memory for a bf16 x

  int64_t rows() const { return x.rows; }
  int64_t units() const { return (weights->out() + 31) / 32; }
  int64_t UnitCost() const { return weights->in() * (2 + rows()); }
};

}  // namespace twinspark
