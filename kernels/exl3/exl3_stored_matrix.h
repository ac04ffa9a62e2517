// A random EXL3 matrix as a checkpoint stores it, with a naive decoder written from the format's
// text. For tests only: of the CPU op, and of its CUDA sibling.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"

#include "common/check.h"
#include "kernels/exl3/exl3_weights.h"
#include "kernels/testing/random_tensor.h"

namespace twinspark {

// A random matrix as a checkpoint stores it (every bit pattern is a valid tile).
struct StoredMatrix {
  int64_t k, n;
  int bits;
  Exl3Codebook codebook;
  std::vector<uint16_t> trellis;
  std::vector<F16> suh, svh, bias;

  StoredMatrix(uint64_t seed, int64_t k_in, int64_t n_in, int bits_in, Exl3Codebook codebook_in)
      : k(k_in), n(n_in), bits(bits_in), codebook(codebook_in) {
    RandomTensor random(seed);
    trellis.resize(static_cast<size_t>(k * n * bits / 16));
    for (uint16_t& word : trellis)
      word = static_cast<uint16_t>(random.Bits());
    const auto scales = [&](int64_t count, float scale) {
      std::vector<F16> values(static_cast<size_t>(count));
      for (F16& v : values)
        v = ToF16((random.Bits() & 1 ? 1.0f : -1.0f) * random.Uniform(0.5f, 1.5f) * scale);
      return values;
    };
    suh = scales(k, 0.03f);
    svh = scales(n, 1.0f);
    bias = scales(n, 0.1f);
  }

  Exl3Source Source() const {
    Exl3Source s;
    s.k = k;
    s.n = n;
    s.bits = bits;
    s.codebook = codebook;
    s.trellis = trellis.data();
    s.suh = suh.data();
    s.svh = svh.data();
    return s;
  }

  Exl3Weights Prepare(Exl3Weights::Form form = Exl3Weights::Form::kTrellis) const {
    absl::StatusOr<Exl3Weights> w = Exl3Weights::Prepare(Source(), form);
    CHECK(w.ok()) << w.status().ToString();
    return *std::move(w);
  }

  // Bit b of the tile's stream, then the state of a position: the format's definitions, literally.
  uint16_t State(int64_t kt, int64_t nt, int p) const {
    const uint16_t* tile = trellis.data() + (kt * (n / 16) + nt) * 16 * bits;
    const int total = 256 * bits;
    uint32_t state = 0;
    for (int i = 16; i >= 1; --i) {
      const int j = ((p + 1) * bits - i + total) % total;
      const int word = (j / 16) ^ 1;
      state = state << 1 | ((tile[word] >> (15 - j % 16)) & 1u);
    }
    return static_cast<uint16_t>(state);
  }

  std::vector<F16> NaiveDecode() const {
    std::vector<F16> wq(static_cast<size_t>(k * n));
    for (int64_t kt = 0; kt < k / 16; ++kt) {
      for (int64_t nt = 0; nt < n / 16; ++nt) {
        for (int p = 0; p < 256; ++p) {
          const int64_t row = 2 * ((p >> 3) & 3) + (p & 1) + 8 * ((p >> 1) & 1);
          const int64_t col = (p >> 5) + 8 * ((p >> 2) & 1);
          wq[static_cast<size_t>((16 * kt + row) * n + 16 * nt + col)] =
              Exl3DecodeState(codebook, State(kt, nt, p));
        }
      }
    }
    return wq;
  }
};

// H / sqrt(128) applied to every 128-block, in double.
inline void NaiveHadamard(std::vector<double>& v) {
  for (size_t base = 0; base < v.size(); base += 128) {
    std::array<double, 128> out{};
    for (unsigned i = 0; i < 128; ++i) {
      for (unsigned j = 0; j < 128; ++j)
        out[i] += (std::popcount(i & j) % 2 ? -1.0 : 1.0) * v[base + j];
    }
    for (size_t i = 0; i < 128; ++i)
      v[base + i] = out[i] / std::sqrt(128.0);
  }
}

}  // namespace twinspark
