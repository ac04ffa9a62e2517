// Seeded random data for tests and benches of ops. One generator per test, its seed in the failure
// message; the sequence is the same on every platform (no std::normal_distribution).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/dtype.h"

namespace twinspark {

class RandomTensor {
 public:
  explicit RandomTensor(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}

  uint64_t Bits() {  // splitmix64
    uint64_t z = (state_ += 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
  }
  int64_t Below(int64_t bound) {
    return static_cast<int64_t>(Bits() % static_cast<uint64_t>(bound));
  }
  float Uniform(float low, float high) {
    return low + (high - low) * static_cast<float>(Bits() >> 40) * 0x1p-24f;
  }
  float Normal() {  // sum of 12 uniforms: variance 1, range +-6
    float sum = -6.0f;
    for (int i = 0; i < 12; ++i)
      sum += static_cast<float>(Bits() >> 40) * 0x1p-24f;
    return sum;
  }

  std::vector<float> NormalF32(int64_t count, float scale = 1.0f) {
    std::vector<float> values(static_cast<size_t>(count));
    for (float& v : values)
      v = Normal() * scale;
    return values;
  }
  std::vector<Bf16> NormalBf16(int64_t count, float scale = 1.0f) {
    std::vector<Bf16> values(static_cast<size_t>(count));
    for (Bf16& v : values)
      v = ToBf16(Normal() * scale);
    return values;
  }

 private:
  uint64_t state_;
};

}  // namespace twinspark
