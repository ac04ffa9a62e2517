// Tiles of attention rows and the memory that a thread works with. Internal to attention.
#pragma once

#include <algorithm>
#include <cstdint>

namespace twinspark {

inline constexpr int64_t kMaxTileRows = 8;
inline constexpr int64_t kPoolKeys =
    1024;                            // tiles grow up to this many keys (2 MiB at head_dim 512)
inline constexpr int64_t kPad = 16;  // score rows are padded to whole vectors
inline constexpr int64_t kMostQueries = 32;  // (row, head) pairs computed together

// Rows [row_begin, row_end) and the keys they see: pool rows are ring positions, step rows, then
// the sorted union of the selections.
struct AttentionTile {
  int64_t row_begin = 0, row_end = 0;
  int64_t ring_lo = 0, ring_hi = 0;
  int64_t step_lo = 0, step_hi = 0;
  int64_t num_groups = 0;
  int32_t* groups = nullptr;

  int64_t num_ring() const { return ring_hi - ring_lo; }
  int64_t num_step() const { return step_hi - step_lo; }
  int64_t num_keys() const { return num_ring() + num_step() + num_groups; }
};

inline int64_t MostQueries(int64_t num_heads) {
  return std::min(kMostQueries, kMaxTileRows * num_heads);
}

// Pool rows lie one cache line further apart than they are long: equal columns of all rows would
// share a few sets of the first-level cache otherwise.
inline int64_t PoolStride(int64_t head_dim) {
  return (head_dim + kPad - 1) / kPad * kPad + kPad;
}

struct TileScratch {
  float* pool = nullptr;      // [pool_keys, PoolStride]
  int32_t* groups = nullptr;  // [pool_keys]
  int32_t* merged = nullptr;  // [pool_keys]
};

// Rows [row_begin, row_end) of a tile and heads [head_begin, head_end).
struct AttendRange {
  int64_t row_begin, row_end, head_begin, head_end;
  int64_t num_rows() const { return row_end - row_begin; }
  int64_t num_heads() const { return head_end - head_begin; }
};

// Scratch of one thread that computes rows. A query is a (row, head) pair.
struct RowScratch {
  const float** keys = nullptr;  // [kMaxTileRows, row_keys]
  float* q = nullptr;            // [MostQueries, head_dim], f32
  float* window = nullptr;       // [MostQueries, window_stride]: dots with all keys of the window
  float* scores = nullptr;       // [MostQueries, row_stride]
  int64_t row_keys = 0;          // most keys of a row
  int64_t window_stride = 0;
  int64_t row_stride = 0;
};

}  // namespace twinspark
