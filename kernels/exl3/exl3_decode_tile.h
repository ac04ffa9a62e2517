// Internal to kernels/exl3: exact decode of one pair of tiles with the current SIMD target.
#pragma once

#include <cstdint>

#include "kernels/exl3/exl3_weights.h"

namespace twinspark {

// words: bits * 16 words in the layout of exl3_weights.h; out[(2 * step + half) * 16 + lane].
void Exl3DecodePairTile(const uint32_t* words, int bits, Exl3Codebook codebook, float* out);

}  // namespace twinspark
