// The one linear op of the model: y[m, out] = x[m, in] W^T, whatever the storage of W.
// Dense weights: f32 FMA chain over the inputs in ascending order, no activation quantisation. EXL3
// weights: see kernels/exl3/exl3_linear.h. For both every output has one accumulation order, so a
// row's bits do not depend on m, the threads, or which other jobs share the call. The element type
// of `y` is the rounding; partial sums of an in-split matrix (TP) go to an f32 `y`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <variant>

#include "kernels/exl3/exl3_linear.h"
#include "kernels/exl3/exl3_weights.h"
#include "kernels/gemm/dense_weights.h"
#include "kernels/launch.h"
#include "kernels/tensor_view.h"

namespace twinspark {

// A matrix of any storage; immutable, thread-safe.
class LinearWeights {
 public:
  LinearWeights() = default;
  explicit LinearWeights(Exl3Weights weights) : weights_(std::move(weights)) {}
  explicit LinearWeights(DenseWeights weights) : weights_(std::move(weights)) {}

  const Exl3Weights* exl3() const { return std::get_if<Exl3Weights>(&weights_); }
  const DenseWeights* dense() const { return std::get_if<DenseWeights>(&weights_); }
  bool empty() const { return std::holds_alternative<std::monostate>(weights_); }

  int64_t in_features() const;
  int64_t out_features() const;
  size_t bytes() const;

 private:
  std::variant<std::monostate, Exl3Weights, DenseWeights> weights_;
};

struct LinearParams {
  const LinearWeights* weights = nullptr;
  ConstTensorView x;  // [m, in] bf16 or f32 (EXL3: f16 too, and fewer columns than k are allowed)
  TensorView y;       // [m, out] bf16 or f32 (EXL3: fewer columns than n are allowed)
  Exl3Rounding rounding = Exl3Rounding::kNone;  // only for EXL3 weights
};

void LinearCpu(const LinearParams& params, const Launch& launch);

// Several independent matrices in one pass over the threads (gate and up, wq_a and wkv, the groups
// of wo_a, the experts of a few rows): two barriers in all. At most kMaxLinearJobs jobs.
inline constexpr int64_t kMaxLinearJobs = 4096;
struct LinearBatchParams {
  std::span<const LinearParams> jobs;
};
void LinearBatchCpu(const LinearBatchParams& params, const Launch& launch);

// Arena bytes that a batch takes at most: the sum over its jobs of this.
size_t LinearScratchBytes(const LinearWeights& weights, int64_t rows, int num_threads);

}  // namespace twinspark
