// Random numbers of a test: the seed is printed, and TWINSPARK_SEED repeats a run.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <random>

namespace twinspark {

// The seed of this run: `fixed` unless TWINSPARK_SEED says otherwise; printed, so that a failure
// can be repeated.
inline uint64_t TestSeed(uint64_t fixed) {
  const char* text = std::getenv("TWINSPARK_SEED");
  const uint64_t seed = text == nullptr ? fixed : std::strtoull(text, nullptr, 10);
  std::cout << "seed " << seed << "\n";
  return seed;
}

// std::mt19937_64 with the few draws tests need, the same on every platform (no std distributions).
class SeededRng {
 public:
  explicit SeededRng(uint64_t seed) : engine_(seed) {}
  uint64_t Next() { return engine_(); }
  // Uniform in [low, high].
  int64_t Int(int64_t low, int64_t high) {
    return low + static_cast<int64_t>(Next() % static_cast<uint64_t>(high - low + 1));
  }
  // Uniform in [0, 1).
  double Unit() { return static_cast<double>(Next() >> 11) * 0x1p-53; }
  float Float(float low, float high) { return low + (high - low) * static_cast<float>(Unit()); }
  bool OneIn(int64_t n) { return Int(1, n) == 1; }

 private:
  std::mt19937_64 engine_;
};

}  // namespace twinspark
