// The check every served row passes.
#include "engram_service/store/row_table.h"

#include <cstring>

namespace twinspark::engram {

bool HasInvalidCode(std::span<const uint8_t> weights, std::span<const uint8_t> scales) {
  // Eight codes at a time: with the sign cleared, 0x7F is the only byte whose sum with 1 sets
  // bit 7.
  constexpr uint64_t kLow7 = 0x7f7f7f7f7f7f7f7full;
  constexpr uint64_t kOnes = 0x0101010101010101ull;
  uint64_t found = 0;
  size_t i = 0;
  for (; i + 8 <= weights.size(); i += 8) {
    uint64_t word;
    memcpy(&word, &weights[i], 8);
    found |= ((word & kLow7) + kOnes) & ~kLow7;
  }
  bool invalid = found != 0;
  for (; i < weights.size(); ++i)
    invalid = invalid || (weights[i] & 0x7f) == 0x7f;
  for (const uint8_t scale : scales)
    invalid = invalid || scale == 255;
  return invalid;
}

}  // namespace twinspark::engram
