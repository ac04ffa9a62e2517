// What the tests of ops share: a launch with threads and scratch, owned matrices that are
// deliberately misaligned and padded (so that stride and alignment mistakes show), and the loop
// over SIMD targets.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/arena.h"
#include "kernels/launch.h"
#include "kernels/simd_target.h"
#include "kernels/tensor_view.h"
#include "kernels/testing/random_tensor.h"
#include "kernels/thread_pool.h"

namespace twinspark {

class OpContext {
 public:
  explicit OpContext(int num_threads, size_t arena_bytes = size_t{16} << 20)
      : pool_(num_threads), arena_(arena_bytes) {}
  Launch launch() { return {.pool = &pool_, .arena = &arena_}; }
  Arena& arena() { return arena_; }

 private:
  ThreadPool pool_;
  Arena arena_;
};

// [rows, cols] of f32 or bf16 with 3 elements of padding per row and one before the first; the
// padding must survive every op (PaddingIntact).
class Matrix {
 public:
  Matrix(int64_t rows, int64_t cols, DType dtype)
      : rows_(rows),
        cols_(cols),
        dtype_(dtype),
        bytes_(static_cast<size_t>(rows * stride() + 1) * DTypeBytes(dtype), kPadByte) {}

  int64_t rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  DType dtype() const { return dtype_; }
  TensorView view() { return {data(), dtype_, rows_, cols_, stride()}; }
  ConstTensorView view() const { return const_cast<Matrix*>(this)->view(); }

  float at(int64_t r, int64_t c) const {
    const ConstTensorView v = view();
    return dtype_ == DType::kBf16 ? ToF32(v.Row<Bf16>(r)[c]) : v.Row<float>(r)[c];
  }
  void set(int64_t r, int64_t c, float value) {
    if (dtype_ == DType::kBf16) {
      view().Row<Bf16>(r)[c] = ToBf16(value);
    } else {
      view().Row<float>(r)[c] = value;
    }
  }
  Matrix& Fill(RandomTensor& random, float scale = 1.0f) {
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < cols_; ++c)
        set(r, c, random.Normal() * scale);
    }
    return *this;
  }
  std::vector<float> Values() const {
    std::vector<float> values;
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < cols_; ++c)
        values.push_back(at(r, c));
    }
    return values;
  }
  bool PaddingIntact() const {
    const size_t element = DTypeBytes(dtype_);
    for (size_t i = 0; i < bytes_.size(); ++i) {
      const int64_t e = static_cast<int64_t>(i / element) - 1;
      const bool padding = e < 0 || e % stride() >= cols_;
      if (padding && bytes_[i] != kPadByte) return false;
    }
    return true;
  }

 private:
  static constexpr uint8_t kPadByte = 0x5a;
  int64_t stride() const { return cols_ + 3; }
  void* data() { return bytes_.data() + DTypeBytes(dtype_); }

  int64_t rows_;
  int64_t cols_;
  DType dtype_;
  std::vector<uint8_t> bytes_;
};

// Same shape and same bits.
inline ::testing::AssertionResult SameBits(const Matrix& got, const Matrix& want) {
  for (int64_t r = 0; r < want.rows(); ++r) {
    for (int64_t c = 0; c < want.cols(); ++c) {
      const float g = got.at(r, c), w = want.at(r, c);
      if (std::memcmp(&g, &w, sizeof(g)) != 0) {
        return ::testing::AssertionFailure()
               << "row " << r << " column " << c << ": " << g << " and " << w;
      }
    }
  }
  return ::testing::AssertionSuccess();
}

// |got - want| <= abs + rel * |want|, plus half a bf16 step where got is stored in bf16.
inline ::testing::AssertionResult Near(const Matrix& got,
                                       std::span<const double> want,
                                       double abs_bound,
                                       double rel_bound) {
  const double step = got.dtype() == DType::kBf16 ? 0x1p-8 : 0.0;
  double worst = -1;
  std::string text;
  for (int64_t r = 0; r < got.rows(); ++r) {
    for (int64_t c = 0; c < got.cols(); ++c) {
      const double w = want[static_cast<size_t>(r * got.cols() + c)];
      const double g = static_cast<double>(got.at(r, c));
      const double error = g > w ? g - w : w - g;
      const double bound = abs_bound + (rel_bound + step) * (w < 0 ? -w : w);
      if (error <= bound || error - bound <= worst) continue;
      worst = error - bound;
      text = "row " + std::to_string(r) + " column " + std::to_string(c) + ": got " +
             std::to_string(g) + ", want " + std::to_string(w) + ", bound " + std::to_string(bound);
    }
  }
  if (worst < 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << text;
}

// Runs body on every SIMD target that this machine has; afterwards the best one is back.
template <class Body>
void OnEverySimdTarget(const Body& body) {
  for (const std::string& name : SimdTargets()) {
    ASSERT_TRUE(PinSimdTarget(name).ok());
    SCOPED_TRACE("SIMD target " + name);
    body();
  }
  ASSERT_TRUE(PinSimdTarget("auto").ok());
}

}  // namespace twinspark
