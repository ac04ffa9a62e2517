// Element types of tensors and their exact scalar conversions (no SIMD, no CUDA headers).
// Source of the formats: model specification section 2.1 (e4m3fn, e2m1, e8m0) and IEEE 754 (f16),
// bf16 = upper half of f32. All conversions round to nearest, ties to even; bf16 keeps NaN quiet.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>

namespace twinspark {

enum class DType : uint8_t { kF32, kBf16, kF16, kF8E4M3, kF8E8M0, kI8, kI16, kI32, kI64 };

const char* DTypeName(DType dtype);
size_t DTypeBytes(DType dtype);

// Storage types: plain bits, so that views of them are cheap to pass and never convert by accident.
struct Bf16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};

inline float ToF32(float x) {
  return x;
}
inline float ToF32(Bf16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}
float ToF32(F16 x);

Bf16 ToBf16(float x);
F16 ToF16(float x);

// Rounds to the nearest bf16 number, kept in f32.
inline float RoundBf16(float x) {
  return ToF32(ToBf16(x));
}

// e4m3fn: max 448, no infinity, 0x7f/0xff NaN.
float E4M3ToF32(uint8_t code);
uint8_t F32ToE4M3Saturating(float x);

// E2M1 code 0..15 (bit 3 = sign): 0, .5, 1, 1.5, 2, 3, 4, 6.
float E2M1ToF32(uint8_t code);
uint8_t F32ToE2M1Saturating(float x);

// E8M0: 2^(byte - 127); 255 is NaN.
float E8M0ToF32(uint8_t byte);

}  // namespace twinspark
