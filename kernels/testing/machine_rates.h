// What this processor can do at most, measured where a bench runs, so that "share of the bound"
// means the same on every machine: one core's rates with the SIMD target in use, and the least time
// that an op can take at these.
#pragma once

#include <cstddef>

namespace twinspark {

struct MachineRates {
  double fma_lanes_per_s = 0;     // f32 multiply-adds, all operands in registers; products too
  double simple_lanes_per_s = 0;  // f32 / i32 additions and logic, all operands in registers
  double shift_lanes_per_s = 0;   // shifts, and what moves lanes: fewer units than the others have
  double divide_lanes_per_s = 0;  // f32 divisions
  double read_bytes_per_s = 0;    // streaming reads of a buffer of the given size
  double write_bytes_per_s = 0;   // streaming writes of one
  double call_s = 0;              // an op on one row that does nothing: checks, threads, dispatch
  double norm_chain_s = 0;        // sum of lanes, division, root, division: one after the other
  int lanes = 1;                  // f32 values of a vector
};

// What an op cannot do without, in lanes, bytes and seconds.
struct OpWork {
  double fma = 0, simple = 0, shift = 0, divide = 0;
  double read = 0, written = 0;
  double chain_s = 0;  // what waits for one another and has nothing else beside it

  // `times` as many operations, bytes as they are.
  OpWork Times(double times) const {
    return {fma * times, simple * times, shift * times, divide * times, read, written, chain_s};
  }
};

// The least time: each kind of operation on the units that have it, all of them on all units, bytes
// read and bytes written at their rates, the longest of these; before it the call, after it the
// chain.
double BoundSeconds(const MachineRates& rates, const OpWork& work, int num_threads);

// Operations of the conversions in vec-inl.h, per value. In words: the value is the lower or the
// upper half of a word of two, so it is shifted or masked, and joined with its neighbour after
// rounding (shift, mask, two additions; one look for NaN per two vectors). Otherwise widened and
// shifted, and narrowed with shuffles.
inline OpWork LoadWords() {
  return {.simple = 0.5, .shift = 0.5};
}
inline OpWork StoreWords() {
  return {.simple = 4.5, .shift = 1.5};
}
inline OpWork LoadBf16() {
  return {.shift = 2};
}
inline OpWork StoreBf16(const MachineRates& rates) {
  return {.simple = 4, .shift = 1 + (rates.lanes >= 16 ? 0.5 : 2)};
}
// The exponential of exp-inl.h.
inline OpWork ExpOps() {
  return {.fma = 13, .simple = 10, .shift = 5};
}
OpWork operator+(const OpWork& a, const OpWork& b);

// Vector operations that decode a vector of a packed cache row: a four-bit one is a shift, a
// look-up and a product with sign and scale, an e4m3 one two moves, a mask, a conversion (two) and
// a product.
inline constexpr double kDecodeCacheOps = 6;

// Takes some 50 ms. `working_set_bytes`: of the data that the op streams.
MachineRates MeasureMachineRates(size_t working_set_bytes);

}  // namespace twinspark
