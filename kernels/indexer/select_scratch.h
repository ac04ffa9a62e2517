// What one thread of index_select works with: sizes of its tiles and the memory behind them.
#pragma once

#include <cstdint>

#include "kernels/top_set.h"

namespace twinspark {

inline constexpr int64_t kKeyTile = TopSet::kTile;  // groups scored at a time
inline constexpr int64_t kMaxTileRows = 16;
inline constexpr int64_t kMostLanes = TopSet::kMostLanes;
inline constexpr int64_t kHeadTile = 4;
inline constexpr float kMasked = TopSet::kMasked;

constexpr int64_t RoundUp(int64_t count, int64_t to) {
  return (count + to - 1) / to * to;
}

// Everything one thread needs for a tile of rows. dim and heads are rounded up to whole vectors and
// tiles of heads, with zeros.
struct SelectScratch {
  float* keys = nullptr;     // [kKeyTile / KeyBlock, dim, KeyBlock]
  float* row = nullptr;      // [4, dim]: decoded keys of formats without a decoder into columns
  float* q = nullptr;        // [kMaxTileRows, num_heads, dim]
  float* weights = nullptr;  // [kMaxTileRows, num_heads]
  float* scores = nullptr;   // [kKeyTile + kMostLanes]
  TopSet rows[kMaxTileRows];
  TopSet blocks[kMaxTileRows];
};

}  // namespace twinspark
