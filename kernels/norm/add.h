// out = round(a + b): joins the partial results of two ranks (or of the two halves that a single
// rank computes for the same bits), lower rank first, with the only rounding at the store (model
// specification 5.3). Without b it converts.
#pragma once

#include "kernels/launch.h"
#include "kernels/tensor_view.h"

namespace twinspark {

struct AddParams {
  ConstTensorView a;       // [num_rows, n], kF32 or kBf16
  ConstTensorView b = {};  // same shape, or null data: out = round(a)
  TensorView out;          // [num_rows, n], kF32 or kBf16; may be a or b
};

void AddCpu(const AddParams& params, const Launch& launch);

}  // namespace twinspark
