// Validation, exact widening and repacking of a dense matrix, see dense_weights.h.
#include "kernels/gemm/dense_weights.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"

#include "common/status_macros.h"

namespace twinspark {
namespace {

constexpr int64_t kStrip = 16;
constexpr int64_t kScaleBlock = 32;

absl::Status CheckSource(const DenseSource& s) {
  if (s.out <= 0 || s.in <= 0 || s.data == nullptr)
    return absl::InvalidArgumentError(
        absl::StrFormat("dense matrix of %d outputs x %d inputs", s.out, s.in));
  const bool scaled = s.format == DenseFormat::kFp8Block32 || s.format == DenseFormat::kFp4Group32;
  if (scaled && s.scales == nullptr)
    return absl::InvalidArgumentError("an FP8 or FP4 matrix needs its scales");
  if (s.format == DenseFormat::kFp4Group32 && s.in % kScaleBlock != 0)
    return absl::InvalidArgumentError(
        absl::StrFormat("FP4 matrix with %d inputs: not a multiple of 32", s.in));
  return absl::OkStatus();
}

// Scale byte to f32; NaN for 255.
float Scale(const DenseSource& s, int64_t out, int64_t in) {
  const int64_t row = s.format == DenseFormat::kFp8Block32 ? out / kScaleBlock : out;
  const int64_t stride =
      s.scale_stride != 0 ? s.scale_stride : (s.in + kScaleBlock - 1) / kScaleBlock;
  return E8M0ToF32(s.scales[row * stride + in / kScaleBlock]);
}

// One weight as f32, exactly as stored.
float Weight(const DenseSource& s, int64_t out, int64_t in) {
  switch (s.format) {
    case DenseFormat::kBf16: {
      const int64_t stride = s.row_stride != 0 ? s.row_stride : s.in;
      return ToF32(static_cast<const Bf16*>(s.data)[out * stride + in]);
    }
    case DenseFormat::kF32: {
      const int64_t stride = s.row_stride != 0 ? s.row_stride : s.in;
      return static_cast<const float*>(s.data)[out * stride + in];
    }
    case DenseFormat::kF16: {
      const int64_t stride = s.row_stride != 0 ? s.row_stride : s.in;
      return ToF32(static_cast<const F16*>(s.data)[out * stride + in]);
    }
    case DenseFormat::kFp8Block32: {
      const int64_t stride = s.row_stride != 0 ? s.row_stride : s.in;
      const uint8_t code = static_cast<const uint8_t*>(s.data)[out * stride + in];
      return E4M3ToF32(code) * Scale(s, out, in);
    }
    case DenseFormat::kFp4Group32: {
      const int64_t stride = s.row_stride != 0 ? s.row_stride : s.in / 2;
      const uint8_t codes = static_cast<const uint8_t*>(s.data)[out * stride + in / 2];
      return E2M1ToF32(in % 2 == 0 ? codes & 15 : codes >> 4) * Scale(s, out, in);
    }
  }
  return std::numeric_limits<float>::quiet_NaN();
}

}  // namespace

absl::StatusOr<DenseWeights> DenseWeights::Prepare(const DenseSource& source) {
  RETURN_IF_ERROR(CheckSource(source));
  DenseWeights w;
  w.out_ = source.out;
  w.in_ = source.in;
  const bool keep_f32 = source.format == DenseFormat::kF32 || source.format == DenseFormat::kF16;
  w.dtype_ = keep_f32 ? DType::kF32 : DType::kBf16;
  // Pairs of strips, so that 16-lane targets always find two.
  const int64_t strips = (source.out + 2 * kStrip - 1) / (2 * kStrip) * 2;
  const size_t size = static_cast<size_t>(strips * kStrip * source.in);
  if (keep_f32) {
    w.f32_.resize(size);
  } else {
    w.bf16_.resize(size);
  }
  for (int64_t out = 0; out < source.out; ++out) {
    const int64_t first = (out / kStrip) * source.in * kStrip + out % kStrip;
    for (int64_t in = 0; in < source.in; ++in) {
      const size_t at = static_cast<size_t>(first + in * kStrip);
      const float value = Weight(source, out, in);
      if (keep_f32) {
        w.f32_[at] = value;
        continue;
      }
      w.bf16_[at] = ToBf16(value).bits;
      if (!(RoundBf16(value) == value))  // a NaN too
        return absl::InvalidArgumentError(absl::StrFormat(
            "weight [%d, %d] is %g: not a finite bf16 number (element or scale broken)", out, in,
            value));
    }
  }
  return w;
}

size_t DenseWeights::bytes() const {
  return bf16_.size() * sizeof(uint16_t) + f32_.size() * sizeof(float);
}

}  // namespace twinspark
