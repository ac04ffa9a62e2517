// Validation and repacking of one EXL3 matrix, see exl3_weights.h.
#include "kernels/exl3/exl3_weights.h"

#include <cmath>
#include <cstring>

#include "absl/status/status.h"
#include "absl/strings/str_format.h"

#include "common/check.h"
#include "common/status_macros.h"
#include "kernels/exl3/exl3_decode_tile.h"

namespace twinspark {
namespace {

absl::Status CheckSource(const Exl3Source& s) {
  if (s.k <= 0 || s.k % 128 != 0 || s.n <= 0 || s.n % 128 != 0)
    return absl::InvalidArgumentError(absl::StrFormat(
        "EXL3 matrix of %d inputs x %d outputs: both must be multiples of 128", s.k, s.n));
  if (s.bits < 1 || s.bits > 8)
    return absl::InvalidArgumentError(
        absl::StrFormat("EXL3 matrix with K = %d bits per weight: K is 1..8", s.bits));
  if (s.trellis == nullptr || (s.suh == nullptr) == (s.su == nullptr) ||
      (s.svh == nullptr) == (s.sv == nullptr))
    return absl::InvalidArgumentError(
        "an EXL3 matrix needs trellis, exactly one of suh and su, exactly one of svh and sv");
  if (s.trellis_row_stride != 0 && s.trellis_row_stride < s.n * s.bits)
    return absl::InvalidArgumentError(absl::StrFormat("EXL3 tile rows %d words apart, a row has %d",
                                                      s.trellis_row_stride, s.n * s.bits));
  return absl::OkStatus();
}

// One of the two scale vectors, as f32.
absl::Status ReadScales(const char* name,
                        const F16* values,
                        const uint16_t* signs,
                        int64_t count,
                        std::vector<float>& to) {
  to.resize(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    float value = 0.0f;
    if (values != nullptr) {
      value = ToF32(values[i]);
    } else {
      value = ((signs[i / 16] >> (i % 16)) & 1) != 0 ? -1.0f : 1.0f;
    }
    if (!std::isfinite(value))
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s[%d] of an EXL3 matrix is not finite (f16 bits %04x)", name, i, values[i].bits));
    to[static_cast<size_t>(i)] = value;
  }
  return absl::OkStatus();
}

// Words of all column pairs, transposed as the header says.
std::vector<uint32_t> Transpose(const Exl3Source& s) {
  const int64_t tiles_down = s.k / 16;
  const int64_t tile_halves = 16 * s.bits;
  const int64_t stride = s.trellis_row_stride != 0 ? s.trellis_row_stride : s.n * s.bits;
  std::vector<uint32_t> words(static_cast<size_t>(s.k * s.n * s.bits / 32));
  uint32_t tile[64];
  for (int64_t kt = 0; kt < tiles_down; ++kt) {
    for (int64_t nt = 0; nt < s.n / 16; ++nt) {
      std::memcpy(tile, s.trellis + kt * stride + nt * tile_halves,
                  static_cast<size_t>(tile_halves) * sizeof(uint16_t));
      uint32_t* to = words.data() + ((nt / 2) * tiles_down + kt) * s.bits * 16 + 8 * (nt % 2);
      for (int i = 0; i < s.bits; ++i) {
        for (int j = 0; j < 8; ++j)
          to[i * 16 + j] = tile[j * s.bits + i];
      }
    }
  }
  return words;
}

}  // namespace

const char* Exl3CodebookName(Exl3Codebook codebook) {
  switch (codebook) {
    case Exl3Codebook::k3Inst:
      return "3inst";
    case Exl3Codebook::kMcg:
      return "mcg";
    case Exl3Codebook::kMul1:
      return "mul1";
  }
  return "unknown";
}

absl::StatusOr<Exl3Weights> Exl3Weights::Prepare(const Exl3Source& source, Form form) {
  RETURN_IF_ERROR(CheckSource(source));
  Exl3Weights w;
  w.k_ = source.k;
  w.n_ = source.n;
  w.bits_ = source.bits;
  w.codebook_ = source.codebook;
  w.form_ = form;
  RETURN_IF_ERROR(ReadScales("suh", source.suh, source.su, source.k, w.suh_));
  RETURN_IF_ERROR(ReadScales("svh", source.svh, source.sv, source.n, w.svh_));
  if (source.bias != nullptr)
    RETURN_IF_ERROR(ReadScales("bias", source.bias, nullptr, source.n, w.bias_));
  w.words_ = Transpose(source);
  if (form == Form::kDecodedF16) {
    w.halves_.resize(static_cast<size_t>(w.k_ * w.n_));
    float values[512];
    for (int64_t pair_tile = 0; pair_tile < w.k_ * w.n_ / 512; ++pair_tile) {
      Exl3DecodePairTile(w.words_.data() + pair_tile * w.bits_ * 16, w.bits_, w.codebook_, values);
      for (int64_t i = 0; i < 512; ++i)
        w.halves_[static_cast<size_t>(pair_tile * 512 + i)] = ToF16(values[i]).bits;
    }
    w.words_ = std::vector<uint32_t>();
  }
  return w;
}

size_t Exl3Weights::bytes() const {
  return words_.size() * sizeof(uint32_t) + halves_.size() * sizeof(uint16_t) +
         (suh_.size() + svh_.size() + bias_.size()) * sizeof(float);
}

void Exl3TileStates(const uint16_t* tile, int bits, std::span<uint16_t, 256> states) {
  // The window of 16 bits that ends with symbol p lies in at most two words; one lap is added so
  // that nothing goes negative.
  uint32_t words[64];
  const int num_words = 8 * bits;
  std::memcpy(words, tile, static_cast<size_t>(num_words) * sizeof(uint32_t));
  for (int p = 0; p < 256; ++p) {
    const int end = (p + 257) * bits;
    const int last = (end - 1) / 32;
    const int first = (end - 16) / 32;
    const uint64_t both =
        static_cast<uint64_t>(words[first % num_words]) << 32 | words[last % num_words];
    states[static_cast<size_t>(p)] = static_cast<uint16_t>(both >> (32 * (last + 1) - end));
  }
}

// Plain scalar decode after the specification; the SIMD decode is tested against it.
F16 Exl3DecodeState(Exl3Codebook codebook, uint16_t state) {
  if (codebook == Exl3Codebook::kMul1) {
    const uint32_t x = state * 0x83DCD12Du;
    const uint32_t sum = (x & 0xff) + ((x >> 8) & 0xff) + ((x >> 16) & 0xff) + (x >> 24);
    return ToF16((1774.0f * static_cast<float>(sum) - 905216.0f) * 0x1p-18f);  // exact before
  }
  uint32_t x =
      codebook == Exl3Codebook::k3Inst ? state * 89226354u + 64248484u : state * 0xCBAC1FEDu;
  x = (x & 0x8FFF8FFFu) ^ 0x3B603B60u;
  return ToF16(ToF32(F16{static_cast<uint16_t>(x)}) + ToF32(F16{static_cast<uint16_t>(x >> 16)}));
}

}  // namespace twinspark
