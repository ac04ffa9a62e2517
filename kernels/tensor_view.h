// Views of matrices that ops read and write. A view borrows; it is trivially copyable and knows its
// element type. The element type of a result view is the rounding rule: writing to a kBf16 view
// rounds to bf16, to a kF32 view not at all. So the `f32` numerics option of the model is nothing
// but f32 activation buffers, on every backend. Thread-compatible. `data` is host memory for CPU
// ops and device memory for CUDA ops.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/check.h"
#include "kernels/dtype.h"

namespace twinspark {

template <class Pointer>
struct BasicTensorView {
  Pointer data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;  // in elements

  bool empty() const { return rows == 0 || cols == 0; }

  // Row r as T; T must be the storage type of dtype.
  template <class T>
  auto* Row(int64_t r) const {
    DCHECK(r >= 0 && r < rows) << r << " of " << rows;
    using Element = std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const T, T>;
    return static_cast<Element*>(data) + r * row_stride;
  }

  // Rows [begin, begin + count).
  BasicTensorView Rows(int64_t begin, int64_t count) const {
    CHECK(begin >= 0 && count >= 0 && begin + count <= rows)
        << begin << "+" << count << " of " << rows;
    BasicTensorView view = *this;
    view.data = Advance(begin * row_stride);
    view.rows = count;
    return view;
  }

  // Columns [begin, begin + count).
  BasicTensorView Cols(int64_t begin, int64_t count) const {
    CHECK(begin >= 0 && count >= 0 && begin + count <= cols)
        << begin << "+" << count << " of " << cols;
    BasicTensorView view = *this;
    view.data = Advance(begin);
    view.cols = count;
    return view;
  }

 private:
  Pointer Advance(int64_t elements) const {
    using Byte =
        std::conditional_t<std::is_const_v<std::remove_pointer_t<Pointer>>, const char, char>;
    return static_cast<Byte*>(data) + elements * static_cast<int64_t>(DTypeBytes(dtype));
  }
};

using TensorView = BasicTensorView<void*>;

struct ConstTensorView : BasicTensorView<const void*> {
  ConstTensorView() = default;
  ConstTensorView(const BasicTensorView<const void*>& view)  // NOLINT(google-explicit-constructor)
      : BasicTensorView<const void*>(view) {}
  ConstTensorView(const TensorView& view)  // NOLINT(google-explicit-constructor)
      : BasicTensorView<const void*>{view.data, view.dtype, view.rows, view.cols, view.row_stride} {
  }
};

template <class T>
constexpr DType DTypeOf() {
  if constexpr (std::is_same_v<T, float>) return DType::kF32;
  if constexpr (std::is_same_v<T, Bf16>) return DType::kBf16;
  if constexpr (std::is_same_v<T, F16>) return DType::kF16;
  if constexpr (std::is_same_v<T, int8_t>) return DType::kI8;
  if constexpr (std::is_same_v<T, int16_t>) return DType::kI16;
  if constexpr (std::is_same_v<T, int32_t>) return DType::kI32;
  if constexpr (std::is_same_v<T, int64_t>) return DType::kI64;
}

template <class T>
TensorView MakeView(T* data, int64_t rows, int64_t cols) {
  return {data, DTypeOf<T>(), rows, cols, cols};
}
template <class T>
ConstTensorView MakeView(const T* data, int64_t rows, int64_t cols) {
  return ConstTensorView(BasicTensorView<const void*>{data, DTypeOf<T>(), rows, cols, cols});
}

}  // namespace twinspark
