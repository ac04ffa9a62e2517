// A dense matrix in the form that the CPU kernels read, made while a checkpoint is loaded.
// Stored forms (model specification, section 2.1) are widened without loss: bf16 stays, f32 stays,
// f16 becomes f32, FP8 with 32 x 32 scales and packed FP4 with 1 x 32 scales become bf16 (4 or 2
// significant bits times a power of two: exact; a value that is not is refused). Layout: strips of
// 16 outputs, inside a strip the 16 weights of one input are contiguous:
//   data[(strip * in + i) * 16 + lane], output = 16 * strip + lane, padded with zero outputs.
// Immutable after loading, so thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/dtype.h"

namespace twinspark {

enum class DenseFormat : uint8_t {
  kBf16,
  kF32,
  kF16,
  kFp8Block32,  // e4m3 codes, e8m0 scales [ceil(out/32), ceil(in/32)]
  kFp4Group32,  // two e2m1 codes per byte (low nibble = even input), e8m0 scales [out, in/32]
};

// Weights [out, in] as stored, borrowed until Prepare returns. Slices: point `data` at the first
// element of the slice and give the stride of the whole tensor; an in-slice of a scaled format
// starts and ends at multiples of 32, an out-slice of kFp8Block32 too.
struct DenseSource {
  DenseFormat format = DenseFormat::kBf16;
  int64_t out = 0;
  int64_t in = 0;
  const void* data = nullptr;
  int64_t row_stride = 0;           // in stored elements (bytes for kFp4Group32); 0 = contiguous
  const uint8_t* scales = nullptr;  // e8m0
  int64_t scale_stride = 0;         // 0 = contiguous
};

class DenseWeights {
 public:
  DenseWeights() = default;

  // Fails with InvalidArgument on impossible shapes, NaN scales and values that are not exact.
  static absl::StatusOr<DenseWeights> Prepare(const DenseSource& source);

  int64_t out() const { return out_; }
  int64_t in() const { return in_; }
  DType dtype() const { return dtype_; }  // kBf16 or kF32: what the kernel reads
  size_t bytes() const;

  const uint16_t* Bf16Strip(int64_t strip) const { return bf16_.data() + strip * in_ * 16; }
  const float* F32Strip(int64_t strip) const { return f32_.data() + strip * in_ * 16; }

 private:
  int64_t out_ = 0;
  int64_t in_ = 0;
  DType dtype_ = DType::kBf16;
  std::vector<uint16_t> bf16_;
  std::vector<float> f32_;
};

}  // namespace twinspark
