// Philox4x32-10 and the Gumbel value of a word.
#include "kernels/sampling/keyed_noise.h"

#include <cmath>

namespace twinspark {

std::array<uint32_t, 4> Philox4x32(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
  constexpr int kNumRounds = 10;
  for (int round = 0; round < kNumRounds; ++round) {
    const uint64_t product0 = kPhiloxMultiplier0 * counter[0];
    const uint64_t product1 = kPhiloxMultiplier1 * counter[2];
    counter = {static_cast<uint32_t>(product1 >> 32) ^ counter[1] ^ key[0],
               static_cast<uint32_t>(product1),
               static_cast<uint32_t>(product0 >> 32) ^ counter[3] ^ key[1],
               static_cast<uint32_t>(product0)};
    key[0] += kPhiloxWeyl0;
    key[1] += kPhiloxWeyl1;
  }
  return counter;
}

uint32_t NoiseWord(const NoiseKey& key, uint32_t token) {
  return Philox4x32({key.position, token, key.choice, 0},
                    {static_cast<uint32_t>(key.seed), static_cast<uint32_t>(key.seed >> 32)})[0];
}

float GumbelFromWord(uint32_t word) {
  const double u = (static_cast<double>(word) + 0.5) * 0x1p-32;
  return static_cast<float>(-std::log(-std::log(u)));
}

}  // namespace twinspark
