// y[m, n] = x[m, k] W for EXL3 matrices, m = 1 .. any, and the plain decode of a matrix.
// W = diag(suh) B Wq B diag(svh) (EXL3 specification, section 3): per row and 128-channel block
//   xh = round(Hadamard(x * suh) * c),   z = xh Wq (f32),   y = Hadamard(z) * c * svh + bias.
// Accumulation: every output is one f32 FMA chain over the inputs in tile order, inside a tile in
// ring order (kExl3RowOrder), whatever m, the number of threads, the job's neighbours or the form
// of the weights. So a row has the same bits alone or in any chunk. With in-split weights (TP) the
// op gives this rank's partial, its own output transform included: use an f32 `y` and add in rank
// order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/exl3/exl3_weights.h"
#include "kernels/launch.h"
#include "kernels/tensor_view.h"

namespace twinspark {

// Rounding of the rotated input (specification section 3.3).
enum class Exl3Rounding : uint8_t {
  kNone,         // f32: the model
  kF16,          // one rounding before the product: what the CUDA kernels do
  kF16Upstream,  // x * suh rounded to f16 too: only for golden comparison
};

struct Exl3LinearParams {
  const Exl3Weights* weights = nullptr;
  ConstTensorView x;  // [m, <= k] bf16, f32 or f16; missing columns are zeros
  TensorView y;       // [m, <= n] bf16 (rounded once, at the store) or f32; trimmed to its columns
  Exl3Rounding rounding = Exl3Rounding::kNone;
};

// Several matrices in one pass over the threads: two barriers in all instead of two each. Jobs are
// independent: each has its own input, output and number of rows; no output may overlap an input.
struct Exl3LinearBatchParams {
  std::span<const Exl3LinearParams> jobs;
};
void Exl3LinearBatchCpu(const Exl3LinearBatchParams& params, const Launch& launch);
void Exl3LinearCpu(const Exl3LinearParams& params, const Launch& launch);

// Arena bytes that a batch takes at most. `rows` beyond kExl3RowBlock cost nothing more.
inline constexpr int64_t kExl3RowBlock = 192;
struct Exl3ScratchShape {
  int64_t rows = 0;
  int64_t k = 0;
};
size_t Exl3LinearScratchBytes(std::span<const Exl3ScratchShape> jobs, int num_threads);

// The decoded matrix Wq in the rotated basis, row-major [k, n]; exact.
void Exl3Decode(const Exl3Weights& weights, std::span<F16> wq);

// The rotated input xh of one job, [m, k] f32, in natural channel order. For tests and golden data.
void Exl3RotateInput(const Exl3LinearParams& params, std::span<float> xh);

}  // namespace twinspark
