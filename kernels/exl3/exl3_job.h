// Internal to kernels/exl3: one matrix of a batch as the SIMD code sees it, for one block of rows.
#pragma once

#include <cstdint>

#include "kernels/exl3/exl3_linear.h"

namespace twinspark {

struct Exl3Job {
  const Exl3Weights* weights = nullptr;
  ConstTensorView x;  // the rows of this block
  TensorView y;
  Exl3Rounding rounding = Exl3Rounding::kNone;
  float* xh = nullptr;    // [rows, xh_stride]: rotated input, inside every 16 in kExl3RowOrder
  int64_t xh_stride = 0;  // k plus padding, so that six rows do not share one cache set

  int64_t rows() const { return x.rows; }
  int64_t blocks_in() const { return weights->k() / 128; }
  int64_t blocks_out() const { return weights->n() / 128; }
};

// Tiles decoded at a time: a panel of 8 tiles (8 or 16 KiB) stays in the first-level cache.
inline constexpr int64_t kExl3PanelTiles = 8;

// Scratch of one thread, in floats: a panel for up to 16 lanes, the sums of one block of 128
// columns.
inline constexpr int64_t kExl3PanelFloats = kExl3PanelTiles * 16 * 2 * 16;
inline constexpr int64_t kExl3ThreadFloats = kExl3PanelFloats + kExl3RowBlock * 128;

}  // namespace twinspark
