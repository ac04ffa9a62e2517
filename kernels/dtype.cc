// See dtype.h. Rounding to a narrower type is done on the bits (round half to even by adding half
// an ulp minus one plus the last kept bit); subnormals by adding a number whose ulp is the wanted
// step.
#include "kernels/dtype.h"

#include <cmath>
#include <limits>

#include "common/check.h"

namespace twinspark {
namespace {

constexpr uint32_t kF32Sign = 0x80000000u;
constexpr uint32_t kF32Infinity = 0x7f800000u;

constexpr float kE2M1Values[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};

}  // namespace

const char* DTypeName(DType dtype) {
  switch (dtype) {
    case DType::kF32:
      return "f32";
    case DType::kBf16:
      return "bf16";
    case DType::kF16:
      return "f16";
    case DType::kF8E4M3:
      return "f8_e4m3";
    case DType::kF8E8M0:
      return "f8_e8m0";
    case DType::kI8:
      return "i8";
    case DType::kI16:
      return "i16";
    case DType::kI32:
      return "i32";
    case DType::kI64:
      return "i64";
  }
  return "unknown";
}

size_t DTypeBytes(DType dtype) {
  switch (dtype) {
    case DType::kF8E4M3:
    case DType::kF8E8M0:
    case DType::kI8:
      return 1;
    case DType::kBf16:
    case DType::kF16:
    case DType::kI16:
      return 2;
    case DType::kF32:
    case DType::kI32:
      return 4;
    case DType::kI64:
      return 8;
  }
  CHECK(false) << "unknown dtype " << static_cast<int>(dtype);
  return 0;
}

float ToF32(F16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u)  // infinity and NaN
    return std::bit_cast<float>(sign | kF32Infinity | ((magnitude & 0x3ffu) << 13));
  if (magnitude < 0x400u) {  // zero and subnormals: multiples of 2^-24, exact in f32
    const float value = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
  }
  return std::bit_cast<float>(sign | ((magnitude << 13) + (112u << 23)));
}

Bf16 ToBf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & ~kF32Sign) > kF32Infinity)  // NaN: keep sign and payload, set the quiet bit
    return {static_cast<uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

F16 ToF16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits & kF32Sign) >> 16;
  const uint32_t magnitude = bits & ~kF32Sign;
  uint32_t half = 0;
  if (magnitude > kF32Infinity) {
    half = 0x7e00u | ((magnitude >> 13) & 0x1ffu);
  } else if (magnitude >= 0x477ff000u) {  // 65520 and above round to infinity
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // below 2^-14: the step is 2^-24, the ulp of 0.5
    half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    half = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  }
  return {static_cast<uint16_t>(sign | half)};
}

float E4M3ToF32(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  if (magnitude == 0x7fu) return std::numeric_limits<float>::quiet_NaN();
  if (magnitude < 8u)  // subnormals: multiples of 2^-9
    return std::bit_cast<float>(sign |
                                std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-9f));
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

uint8_t F32ToE4M3Saturating(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t sign = (bits & kF32Sign) >> 24;
  const uint32_t magnitude = bits & ~kF32Sign;
  uint32_t code = 0;
  if (magnitude > kF32Infinity) {
    code = 0x7fu;
  } else if (magnitude >= 0x43e00000u) {  // 448
    code = 0x7eu;
  } else if (magnitude < 0x3c800000u) {  // below 2^-6: the step is 2^-9, the ulp of 2^14
    code = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0x1p14f) - 0x46800000u;
  } else {
    code = ((magnitude + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20) - (120u << 3);
  }
  return static_cast<uint8_t>(sign | code);
}

float E2M1ToF32(uint8_t code) {
  const float value = kE2M1Values[code & 7u];
  return (code & 8u) != 0 ? -value : value;
}

uint8_t F32ToE2M1Saturating(float x) {
  const float a = std::abs(x);
  uint32_t code = 7;  // a NaN saturates too: the format has none
  if (a <= 0.25f) {
    code = 0;
  } else if (a < 0.75f) {
    code = 1;
  } else if (a <= 1.25f) {
    code = 2;
  } else if (a < 1.75f) {
    code = 3;
  } else if (a <= 2.5f) {
    code = 4;
  } else if (a < 3.5f) {
    code = 5;
  } else if (a <= 5.0f) {
    code = 6;
  }
  return static_cast<uint8_t>(code | (std::signbit(x) ? 8u : 0u));
}

float E8M0ToF32(uint8_t byte) {
  if (byte == 255) return std::numeric_limits<float>::quiet_NaN();
  if (byte == 0) return 0x1p-127f;
  return std::bit_cast<float>(static_cast<uint32_t>(byte) << 23);
}

}  // namespace twinspark
