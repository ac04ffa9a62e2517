// What this processor can do at most, measured where a bench runs, so that "share of the bound"
// means the same on every machine: one core's rates with the SIMD target in use.
#pragma once

#include <cstddef>

namespace twinspark {

struct MachineRates {
  double fma_lanes_per_s = 0;     // f32 multiply-adds, all operands in registers
  double simple_lanes_per_s = 0;  // f32 / i32 additions and logic, all operands in registers
  double read_bytes_per_s = 0;    // streaming reads of a buffer of the given size
};

// Vector operations of the conversions in vec-inl.h, which most ops pay per vector of bf16 values:
// widen and shift; round to nearest even with quiet NaNs and narrow.
inline constexpr double kBf16LoadOps = 2;
inline constexpr double kBf16StoreOps = 10;

// Vector operations that decode a vector of a packed cache row: a four-bit one is a shift, a
// look-up and a product with sign and scale, an e4m3 one two moves, a mask, a conversion (two) and
// a product.
inline constexpr double kDecodeCacheOps = 6;

// Takes some 50 ms. `working_set_bytes`: of the data that the op streams.
MachineRates MeasureMachineRates(size_t working_set_bytes);

}  // namespace twinspark
