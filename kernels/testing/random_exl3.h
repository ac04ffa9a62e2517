// EXL3 matrices of random symbols for benches, and what a weight of them costs at least.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "common/check.h"
#include "kernels/exl3/exl3_weights.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {

// Vector operations that decode one vector of mul1 weights (kernels/exl3/README.md counts them).
inline constexpr double kMul1DecodeOps = 13.0;

// [k, n], mul1, all scales equal; the same matrix for the same shape.
inline Exl3Weights RandomExl3(int64_t k, int64_t n, int bits, Exl3Weights::Form form) {
  RandomTensor random(1);
  std::vector<uint16_t> trellis(static_cast<size_t>(k * n * bits / 16));
  for (uint16_t& word : trellis)
    word = static_cast<uint16_t>(random.Bits());
  const std::vector<F16> suh(static_cast<size_t>(k), ToF16(0.02f));
  const std::vector<F16> svh(static_cast<size_t>(n), ToF16(-1.0f));
  Exl3Source source;
  source.k = k;
  source.n = n;
  source.bits = bits;
  source.trellis = trellis.data();
  source.suh = suh.data();
  source.svh = svh.data();
  absl::StatusOr<Exl3Weights> w = Exl3Weights::Prepare(source, form);
  CHECK(w.ok()) << w.status().ToString();
  return *std::move(w);
}

}  // namespace twinspark
