// The keyed Gumbel noise of sampling (dspark specification 2.3): Philox4x32-10 with key = seed and
// counter = (position, token, choice, 0). Target and drafter draw from the same noise, so drafted
// output equals undrafted output, and a resumed request continues as it would have.
#pragma once

#include <array>
#include <cstdint>

namespace twinspark {

inline constexpr uint64_t kPhiloxMultiplier0 = 0xd2511f53, kPhiloxMultiplier1 = 0xcd9e8d57;
inline constexpr uint32_t kPhiloxWeyl0 = 0x9e3779b9, kPhiloxWeyl1 = 0xbb67ae85;

// The block function of Salmon et al. 2011, 10 rounds.
std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key);

struct NoiseKey {
  uint64_t seed = 0;
  uint32_t position = 0;  // absolute position of the token being drawn
  uint32_t choice = 0;    // index among `n`
};

// First output word for a token.
uint32_t NoiseWord(const NoiseKey& key, uint32_t token);

// -ln(-ln u), u = (word + 0.5) / 2^32, in f64, rounded to f32.
float GumbelFromWord(uint32_t word);

}  // namespace twinspark
