// One EXL3 matrix in the form that the CPU kernels read, made while a checkpoint is loaded.
//
// A stored matrix is a grid of 16 x 16 tiles; each tile is a ring of 256 symbols of `bits` bits
// (EXL3 specification, section 1). Ring positions 32j .. 32j+31 hold columns j and j+8, so each
// tile's 8*bits words are transposed to word[i][lane j] = w[j*bits + i]: all lanes then share one
// constant shift per ring position (section 5.8). Two horizontal neighbours stand side by side in
// one row of 16 lanes, and the rows of one such pair are contiguous down the input dimension:
//   words_[((pair * k/16 + kt) * bits + i) * 16 + lane],  lane = 8 * (nt & 1) + j,  pair = nt / 2.
// The form kDecodedF16 keeps the decoded f16 values instead, in the order the product uses them:
//   half_[((pair * k/16 + kt) * 32 + 2 * step + half) * 16 + lane]  (step: kExl3RowOrder below).
// Both forms give the same bits in every product. Immutable after loading, so thread-safe.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/statusor.h"

#include "kernels/dtype.h"

namespace twinspark {

enum class Exl3Codebook : uint8_t { k3Inst = 0, kMcg = 1, kMul1 = 2 };
const char* Exl3CodebookName(Exl3Codebook codebook);

// Values of the marker tensors P.mcg and P.mul1 (int32); a loader refuses any other.
inline constexpr int32_t kExl3McgMarker = -877912083;    // 0xCBAC1FED
inline constexpr int32_t kExl3Mul1Marker = -2082680531;  // 0x83DCD12D

// Rows of a tile in ring order: the one order in which a tile's 16 inputs enter every sum.
inline constexpr std::array<int, 16> kExl3RowOrder = {0, 1, 8,  9,  2, 3, 10, 11,
                                                      4, 5, 12, 13, 6, 7, 14, 15};

// A matrix (or the slice of one that a rank owns) as a checkpoint stores it; everything is borrowed
// until Exl3Weights::Prepare returns. k inputs x n outputs, both multiples of 128.
// Slices: outputs [n0, n1) = the same rows of tiles from tile column n0/16, svh (and bias) from n0;
// inputs [k0, k1) = tile rows from k0/16, suh from k0, bias on rank 0 only. A reader may fetch just
// these bytes or point into the whole tensor with `trellis_row_stride`.
struct Exl3Source {
  int64_t k = 0;
  int64_t n = 0;
  int bits = 0;  // K, 1..8: trellis shape[2] / 16
  Exl3Codebook codebook = Exl3Codebook::kMul1;
  const uint16_t* trellis = nullptr;  // [k/16, n/16, 16 * bits]
  int64_t trellis_row_stride = 0;     // in uint16 between tile rows; 0 = contiguous (n * bits)
  const F16* suh = nullptr;           // [k]; or null with su
  const F16* svh = nullptr;           // [n]; or null with sv
  const uint16_t* su = nullptr;       // legacy signs [k/16], bit i of word j = element 16j + i
  const uint16_t* sv = nullptr;       // legacy signs [n/16]
  const F16* bias = nullptr;          // optional [n]
};

// Decode of one state, for tests and tools (the exact f16 value as stored bits).
F16 Exl3DecodeState(Exl3Codebook codebook, uint16_t state);

// The 256 states of one stored tile (16 * bits words) in ring order, for tests and tools.
void Exl3TileStates(const uint16_t* tile, int bits, std::span<uint16_t, 256> states);

class Exl3Weights {
 public:
  enum class Form : uint8_t { kTrellis, kDecodedF16 };

  Exl3Weights() = default;

  // Fails with InvalidArgument (values in the text) on impossible shapes and non-finite scales.
  static absl::StatusOr<Exl3Weights> Prepare(const Exl3Source& source, Form form = Form::kTrellis);

  int64_t k() const { return k_; }
  int64_t n() const { return n_; }
  int bits() const { return bits_; }
  Exl3Codebook codebook() const { return codebook_; }
  Form form() const { return form_; }
  size_t bytes() const;

  std::span<const float> suh() const { return suh_; }    // [k]
  std::span<const float> svh() const { return svh_; }    // [n]
  std::span<const float> bias() const { return bias_; }  // [n] or empty

  // The kernels' view of one column pair (32 columns), see the file head.
  const uint32_t* PairWords(int64_t pair) const {
    return words_.data() + pair * (k_ / 16) * bits_ * 16;
  }
  const uint16_t* PairHalves(int64_t pair) const { return halves_.data() + pair * k_ * 32; }

 private:
  int64_t k_ = 0;
  int64_t n_ = 0;
  int bits_ = 0;
  Exl3Codebook codebook_ = Exl3Codebook::kMul1;
  Form form_ = Form::kTrellis;
  std::vector<uint32_t> words_;   // kTrellis
  std::vector<uint16_t> halves_;  // kDecodedF16: f16 bits
  std::vector<float> suh_, svh_, bias_;
};

}  // namespace twinspark
