// Comparison of an op's result with a reference: everywhere |got - want| <= abs + rel * |want|.
// Bit comparison for what must be exact. Both name the worst element.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <span>

#include <gtest/gtest.h>

#include "kernels/dtype.h"

namespace twinspark {

// NaN is never near anything.
template <class Want>
::testing::AssertionResult AllNear(std::span<const float> got,
                                   std::span<const Want> want,
                                   double abs_bound,
                                   double rel_bound) {
  if (got.size() != want.size())
    return ::testing::AssertionFailure() << "sizes " << got.size() << " and " << want.size();
  size_t worst = 0;
  double worst_excess = -1.0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double reference = static_cast<double>(want[i]);
    const double error = std::abs(static_cast<double>(got[i]) - reference);
    const double bound = abs_bound + rel_bound * std::abs(reference);
    const double excess = error <= bound ? 0.0 : (std::isnan(error) ? HUGE_VAL : error - bound);
    if (excess > worst_excess) {
      worst_excess = excess;
      worst = i;
    }
  }
  if (worst_excess <= 0.0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "worst element " << worst << ": got " << got[worst] << ", want " << want[worst]
         << ", bound " << abs_bound + rel_bound * std::abs(static_cast<double>(want[worst]));
}

// Same bits (so -0 differs from +0, and a NaN equals itself).
template <class T>
::testing::AssertionResult BitEqual(std::span<const T> got, std::span<const T> want) {
  if (got.size() != want.size())
    return ::testing::AssertionFailure() << "sizes " << got.size() << " and " << want.size();
  size_t differing = 0;
  size_t first = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (std::memcmp(&got[i], &want[i], sizeof(T)) != 0 && differing++ == 0) first = i;
  }
  if (differing == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << differing << " of " << got.size() << " elements differ, first at " << first << ": "
         << ToF32(got[first]) << " and " << ToF32(want[first]);
}

// rms of the difference over rms of the reference.
template <class Want>
double RelativeL2(std::span<const float> got, std::span<const Want> want) {
  double error = 0.0;
  double norm = 0.0;
  for (size_t i = 0; i < got.size(); ++i) {
    const double d = static_cast<double>(got[i]) - static_cast<double>(want[i]);
    error += d * d;
    norm += static_cast<double>(want[i]) * static_cast<double>(want[i]);
  }
  return norm > 0.0 ? std::sqrt(error / norm) : std::sqrt(error);
}

}  // namespace twinspark
