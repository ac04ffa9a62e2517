// The 128-point Hadamard transform of EXL3: natural (Sylvester) order, f32, unscaled.
// Butterflies (a, b) -> (a + b, a - b) with strides 1, 2, 4, ..., 64 in this order; every output is
// then one fixed sequence of rounded additions, so the bits are the same on every SIMD target.
// Source: EXL3 format specification, sections 3.1 and 3.2. Called by the EXL3 linear op and by
// tests.
#pragma once

#include <cstdint>

namespace twinspark {

inline constexpr int64_t kHadamardBlock = 128;
// RN32(1 / sqrt(128)), bit pattern 0x3DB504F3: multiplied in after the butterflies.
inline constexpr float kHadamardScale = 0x1.6a09e6p-4f;

// Transforms `num_blocks` consecutive blocks of 128 values in place. No alignment is needed.
void Hadamard128(float* values, int64_t num_blocks);

}  // namespace twinspark
