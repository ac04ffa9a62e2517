// Attention on the CPU. Neighbouring rows of one sequence form a tile: the keys that any of them
// sees are decoded once into an f32 pool (the values are the same either way). Up to kMostQueries
// (row, head) pairs are computed together: the keys of the window, which neighbouring rows share,
// meet all of them while they are near; selected keys meet the heads of their row. With many tiles
// threads take whole tiles; with few (decode) they share the decoding and then split rows and
// heads. An output is one chain of FMAs over the row's key list, so neither the tiling nor the
// threads can change it.
//
// Cost per row and head: 4 * num_keys * head_dim flops.
#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/attention_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/dot-inl.h"
#include "kernels/exp-inl.h"
#include "kernels/parallel_rows.h"
#include "kernels/quant/codec-inl.h"

#ifndef TWINSPARK_KERNELS_ATTENTION_TILE_
#define TWINSPARK_KERNELS_ATTENTION_TILE_
namespace twinspark {
namespace {

constexpr int64_t kMaxTileRows = 8;
constexpr int64_t kPoolKeys = 1024;   // tiles grow up to this many keys (2 MiB at head_dim 512)
constexpr int64_t kPad = 16;          // score rows are padded to whole vectors
constexpr int64_t kMostQueries = 32;  // (row, head) pairs computed together

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

int64_t MostQueries(int64_t num_heads) {
  return std::min(kMostQueries, kMaxTileRows * num_heads);
}

// Pool rows lie one cache line further apart than they are long: equal columns of all rows would
// share a few sets of the first-level cache otherwise.
int64_t PoolStride(int64_t head_dim) {
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

}  // namespace
}  // namespace twinspark
#endif  // TWINSPARK_KERNELS_ATTENTION_TILE_

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

// Decodes pool rows [begin, end) of a tile.
void DecodeKeys(
    const AttentionParams& p, const AttentionTile& tile, float* pool, int64_t begin, int64_t end) {
  const AttentionRow& first = p.rows[tile.row_begin];
  const int64_t cols = p.head_dim;
  const int64_t stride = PoolStride(cols);
  const auto row_of = [](const CacheRows& store, int64_t row) {
    CHECK(row >= 0 && row < store.num_rows) << row << " of " << store.num_rows;
    return static_cast<const uint8_t*>(store.data) + row * store.row_bytes();
  };
  for (int64_t k = begin; k < end; ++k) {
    float* out = pool + k * stride;
    int64_t i = k;
    if (i < tile.num_ring()) {
      const int64_t slot = (tile.ring_lo + i) % p.ring_slots;
      DecodeRow(p.ring.format, row_of(p.ring, first.ring_first_row + slot), cols, out);
      continue;
    }
    i -= tile.num_ring();
    if (i < tile.num_step()) {
      DecodeRow(p.step_rows.format, row_of(p.step_rows, tile.step_lo + i), cols, out);
      continue;
    }
    const int64_t group = tile.groups[i - tile.num_step()];
    const int64_t row =
        int64_t{first.pages[group / p.rows_per_page]} * p.rows_per_page + group % p.rows_per_page;
    DecodeRow(p.compressed.format, row_of(p.compressed, row), cols, out);
  }
}

// scores[k] = exp(scale * scores[k] - M); returns the denominator.
float SoftmaxRow(float* scores, int64_t num_keys, float scale, float sink, bool round) {
  const DF d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t padded = hwy::RoundUpTo(static_cast<size_t>(num_keys), hn::Lanes(d));
  constexpr float kMasked = -1e30f;
  for (int64_t k = num_keys; k < padded; ++k)
    scores[k] = kMasked;
  VF largest = hn::Set(d, sink);
  for (int64_t k = 0; k < padded; k += lanes) {
    const VF s = hn::Mul(hn::LoadU(d, scores + k), hn::Set(d, scale));
    hn::StoreU(s, d, scores + k);
    largest = hn::Max(largest, s);
  }
  const float max = hn::GetLane(hn::MaxOfLanes(d, largest));
  VF sum = hn::Zero(d);
  for (int64_t k = 0; k < padded; k += lanes) {
    const VF e = ExpF32(d, hn::Sub(hn::LoadU(d, scores + k), hn::Set(d, max)));
    sum = hn::Add(sum, e);
    hn::StoreU(round ? RoundToBf16(d, e) : e, d, scores + k);
  }
  return ReduceLanes(d, sum) + std::exp(sink - max);
}

// Columns of the values that are summed at a time, in vectors.
constexpr int kValueVecs = hn::MaxLanes(DF()) >= 16 ? 4 : 2;
constexpr int64_t kValueCols = kValueVecs * static_cast<int64_t>(hn::MaxLanes(DF()));

// sums[h][0 .. kVecs vectors) += sum_k e[h][k] * keys[k][c ..] for kHeads heads.
template <int kHeads, int kVecs>
HWY_INLINE void AddKeys(const float* const* keys,
                        int64_t num_keys,
                        const float* e,
                        int64_t e_stride,
                        int64_t c,
                        float* sums) {
  const DF d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  VF acc[kHeads * kVecs];
  TWINSPARK_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    TWINSPARK_UNROLL
    for (int v = 0; v < kVecs; ++v)
      acc[h * kVecs + v] = hn::Load(d, sums + h * kValueCols + v * lanes);
  }
  for (int64_t k = 0; k < num_keys; ++k) {
    VF key[kVecs];
    TWINSPARK_UNROLL
    for (int v = 0; v < kVecs; ++v)
      key[v] = InRegister(hn::LoadU(d, keys[k] + c + v * lanes));
    TWINSPARK_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const VF weight = InRegister(hn::Set(d, e[h * e_stride + k]));
      TWINSPARK_UNROLL
      for (int v = 0; v < kVecs; ++v)
        acc[h * kVecs + v] = hn::MulAdd(weight, key[v], acc[h * kVecs + v]);
    }
  }
  TWINSPARK_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    TWINSPARK_UNROLL
    for (int v = 0; v < kVecs; ++v)
      hn::Store(acc[h * kVecs + v], d, sums + h * kValueCols + v * lanes);
  }
}

// The same for `cols` <= kValueCols columns of any number of heads.
HWY_NOINLINE void AddKeysOfHeads(const float* const* keys,
                                 int64_t num_keys,
                                 const float* e,
                                 int64_t e_stride,
                                 int64_t num_heads,
                                 int64_t c,
                                 int64_t cols,
                                 float* sums) {
  const DF d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  if (cols == kValueCols) {
    int64_t h = 0;
    for (; h + 4 <= num_heads; h += 4)
      AddKeys<4, kValueVecs>(keys, num_keys, e + h * e_stride, e_stride, c, sums + h * kValueCols);
    for (; h + 2 <= num_heads; h += 2)
      AddKeys<2, kValueVecs>(keys, num_keys, e + h * e_stride, e_stride, c, sums + h * kValueCols);
    for (; h < num_heads; ++h)
      AddKeys<1, kValueVecs>(keys, num_keys, e + h * e_stride, e_stride, c, sums + h * kValueCols);
    return;
  }
  for (int64_t h = 0; h < num_heads; ++h) {
    float* out = sums + h * kValueCols;
    int64_t i = 0;
    for (; i + lanes <= cols; i += lanes)
      AddKeys<1, 1>(keys, num_keys, e + h * e_stride, e_stride, c + i, out + i);
    if (i == cols) continue;
    VF acc = hn::Load(d, out + i);
    for (int64_t k = 0; k < num_keys; ++k)
      acc =
          hn::MulAdd(hn::Set(d, e[h * e_stride + k]), LoadTail(d, keys[k] + c + i, cols - i), acc);
    hn::Store(acc, d, out + i);
  }
}

// The row's key list in pool rows.
int64_t ListKeys(const AttentionParams& p,
                 const AttentionTile& tile,
                 const float* pool,
                 int64_t t,
                 const float** keys) {
  const AttentionRow& row = p.rows[t];
  const int64_t stride = PoolStride(p.head_dim);
  int64_t count = 0;
  for (int64_t pos = row.ring_begin; pos < row.ring_end; ++pos) {
    keys[count++] = pool + (pos - tile.ring_lo) * stride;
  }
  const float* step_pool = pool + tile.num_ring() * stride;
  for (int64_t i = row.step_begin; i < row.step_end; ++i) {
    keys[count++] = step_pool + (i - tile.step_lo) * stride;
  }
  if (p.num_selected == nullptr) return count;
  const float* group_pool = step_pool + tile.num_step() * stride;
  const int32_t* selected = p.selected.Row<int32_t>(t);
  int64_t slot = 0;
  for (int32_t i = 0; i < p.num_selected[t]; ++i) {
    while (tile.groups[slot] != selected[i])
      ++slot;  // both ascend
    keys[count++] = group_pool + slot * stride;
  }
  return count;
}

template <class Q>
void WidenQueries(const AttentionParams& p, const AttendRange& range, float* q) {
  const DF d;
  const int64_t values = range.num_heads() * p.head_dim;
  for (int64_t t = range.row_begin; t < range.row_end; ++t) {
    const Q* from = p.q.Row<Q>(t) + range.head_begin * p.head_dim;
    ForVectors(d, values,
               [&](const auto& load, const auto& store) HWY_ATTR { store(load(from), q); });
    q += values;
  }
}

// s.window[query][i] = q . pool[i] for the keys of the window (ring and step) that any row sees.
void ScoreWindow(const AttentionParams& p,
                 const AttentionTile& tile,
                 const float* pool,
                 const AttendRange& range,
                 const RowScratch& s) {
  const AttentionRow& first = p.rows[range.row_begin];
  const AttentionRow& last = p.rows[range.row_end - 1];
  const int64_t stride = PoolStride(p.head_dim);
  const auto score = [&](int64_t begin, int64_t end) HWY_ATTR {
    DotBlock([&](int64_t i) { return static_cast<const float*>(s.q + i * p.head_dim); },
             range.num_rows() * range.num_heads(),
             [&](int64_t k) { return pool + (begin + k) * stride; }, end - begin, p.head_dim,
             s.window + begin, s.window_stride);
  };
  score(first.ring_begin - tile.ring_lo, last.ring_end - tile.ring_lo);
  score(tile.num_ring() + first.step_begin - tile.step_lo,
        tile.num_ring() + last.step_end - tile.step_lo);
}

// Scores of row t in the order of its key list; q: its heads; window: their dots with the window.
void ScoreRow(const AttentionParams& p,
              const AttentionTile& tile,
              int64_t t,
              int64_t num_heads,
              const float* q,
              const float* window,
              const float* const* keys,
              int64_t num_keys,
              const RowScratch& s,
              float* scores) {
  const AttentionRow& row = p.rows[t];
  const int64_t num_ring = row.ring_end - row.ring_begin;
  const int64_t num_step = row.step_end - row.step_begin;
  for (int64_t h = 0; h < num_heads; ++h) {
    const float* dots = window + h * s.window_stride;
    float* out = scores + h * s.row_stride;
    std::copy_n(dots + row.ring_begin - tile.ring_lo, num_ring, out);
    std::copy_n(dots + tile.num_ring() + row.step_begin - tile.step_lo, num_step, out + num_ring);
  }
  const int64_t num_window = num_ring + num_step;
  DotBlock([&](int64_t h) { return q + h * p.head_dim; }, num_heads,
           [&](int64_t k) { return keys[num_window + k]; }, num_keys - num_window, p.head_dim,
           scores + num_window, s.row_stride);
}

// Values of all rows, a block of columns at a time, keys in tiles whose columns stay near.
template <class Out>
void SumValues(const AttentionParams& p,
               const AttendRange& range,
               const int64_t* num_keys,
               const float* denominators,
               const RowScratch& s) {
  constexpr int64_t kKeyTile = 96;
  const DF d;
  const int64_t num_heads = range.num_heads();
  const int64_t most_keys = *std::max_element(num_keys, num_keys + range.num_rows());
  HWY_ALIGN float sums[kMostQueries * kValueCols];
  for (int64_t c = 0; c < p.head_dim; c += kValueCols) {
    const int64_t cols = std::min(kValueCols, p.head_dim - c);
    std::fill(sums, sums + range.num_rows() * num_heads * kValueCols, 0.0f);
    for (int64_t k = 0; k < most_keys; k += kKeyTile) {
      for (int64_t r = 0; r < range.num_rows(); ++r) {
        const int64_t count = std::min(kKeyTile, num_keys[r] - k);
        if (count <= 0) continue;
        AddKeysOfHeads(s.keys + r * s.row_keys + k, count,
                       s.scores + r * num_heads * s.row_stride + k, s.row_stride, num_heads, c,
                       cols, sums + r * num_heads * kValueCols);
      }
    }
    for (int64_t i = 0; i < range.num_rows() * num_heads; ++i) {
      const float* from = sums + i * kValueCols;
      Out* out = p.out.Row<Out>(range.row_begin + i / num_heads) +
                 (range.head_begin + i % num_heads) * p.head_dim + c;
      const VF denominator = hn::Set(d, denominators[i]);
      MapVectors<false>(d, cols, out, [&](const auto& load) HWY_ATTR {
        return hn::Div(load(from), denominator);
      });
    }
  }
}

void AttendPairs(const AttentionParams& p,
                 const AttentionTile& tile,
                 const float* pool,
                 const AttendRange& range,
                 const RowScratch& s) {
  WithFloatType(p.q.dtype, [&](auto* type) {
    WidenQueries<std::remove_pointer_t<decltype(type)>>(p, range, s.q);
  });
  ScoreWindow(p, tile, pool, range, s);
  const int64_t num_heads = range.num_heads();
  int64_t num_keys[kMaxTileRows];
  float denominators[kMostQueries];
  for (int64_t r = 0; r < range.num_rows(); ++r) {
    const int64_t t = range.row_begin + r, first = r * num_heads;
    const float** keys = s.keys + r * s.row_keys;
    float* scores = s.scores + first * s.row_stride;
    num_keys[r] = ListKeys(p, tile, pool, t, keys);
    ScoreRow(p, tile, t, num_heads, s.q + first * p.head_dim, s.window + first * s.window_stride,
             keys, num_keys[r], s, scores);
    for (int64_t h = 0; h < num_heads; ++h) {
      const float sink = p.sink[range.head_begin + h];
      denominators[first + h] = num_keys[r] == 0
                                    ? 1.0f  // no keys: zeros
                                    : SoftmaxRow(scores + h * s.row_stride, num_keys[r], p.scale,
                                                 sink, p.round_probabilities);
    }
  }
  WithFloatType(p.out.dtype, [&](auto* type) {
    SumValues<std::remove_pointer_t<decltype(type)>>(p, range, num_keys, denominators, s);
  });
}

// Any rows of a tile and any heads.
void AttendRows(const AttentionParams& p,
                const AttentionTile& tile,
                const float* pool,
                const AttendRange& all,
                const RowScratch& s) {
  const int64_t heads = std::min(kMostQueries, all.num_heads());
  const int64_t rows = std::min(kMaxTileRows, kMostQueries / heads);
  for (int64_t t = all.row_begin; t < all.row_end; t += rows) {
    for (int64_t h = all.head_begin; h < all.head_end; h += heads) {
      AttendPairs(p, tile, pool,
                  {t, std::min(all.row_end, t + rows), h, std::min(all.head_end, h + heads)}, s);
    }
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
namespace {

HWY_EXPORT(DecodeKeys);
HWY_EXPORT(AttendRows);

// Sizes of one call, from which tiles and scratch follow.
struct AttentionSizes {
  int64_t window = 0;    // most ring + step keys of a row
  int64_t selected = 0;  // most selected groups of a row
  int64_t tile_rows = 1;
  int64_t pool_keys = 0;
  int64_t row_keys = 0;
};

int64_t TileRows(int64_t window, int64_t selected) {
  return std::clamp((kPoolKeys - window) / (selected + 1), int64_t{1}, kMaxTileRows);
}

AttentionSizes SizesOf(const AttentionParams& p) {
  AttentionSizes sizes;
  for (int64_t t = 0; t < p.q.rows; ++t) {
    const AttentionRow& row = p.rows[t];
    CHECK(row.ring_begin <= row.ring_end && row.ring_end - row.ring_begin <= p.ring_slots)
        << row.ring_begin << " " << row.ring_end << " of " << p.ring_slots;
    CHECK_LE(row.step_begin, row.step_end);
    sizes.window =
        std::max(sizes.window, row.ring_end - row.ring_begin + row.step_end - row.step_begin);
    if (p.num_selected != nullptr) {
      CHECK_LE(p.num_selected[t], p.selected.cols);
      sizes.selected = std::max(sizes.selected, int64_t{p.num_selected[t]});
    }
  }
  sizes.tile_rows = TileRows(sizes.window, sizes.selected);
  // Each further row of a tile adds at most one position of the window at each end; rows that do
  // not follow each other start a tile of their own (SameTile).
  sizes.pool_keys = sizes.window + 2 * sizes.tile_rows + sizes.tile_rows * sizes.selected;
  sizes.row_keys = sizes.window + sizes.selected;
  return sizes;
}

bool Near(int64_t a, int64_t b) {
  return a == b || a == b + 1;
}

// Does row b continue a tile whose last row is a?
bool SameTile(const AttentionRow& a, const AttentionRow& b) {
  return a.ring_first_row == b.ring_first_row && a.pages == b.pages &&
         Near(b.ring_begin, a.ring_begin) && Near(b.ring_end, a.ring_end) &&
         Near(b.step_begin, a.step_begin) && Near(b.step_end, a.step_end);
}

int64_t TileEnd(const AttentionParams& p, const AttentionSizes& sizes, int64_t begin) {
  int64_t end = begin + 1;
  while (end < p.q.rows && end - begin < sizes.tile_rows &&
         SameTile(p.rows[end - 1], p.rows[end])) {
    ++end;
  }
  return end;
}

AttentionTile PlanTile(const AttentionParams& p, int64_t begin, int64_t end, TileScratch& scratch) {
  AttentionTile tile;
  tile.row_begin = begin;
  tile.row_end = end;
  tile.ring_lo = p.rows[begin].ring_begin;
  tile.ring_hi = p.rows[end - 1].ring_end;
  tile.step_lo = p.rows[begin].step_begin;
  tile.step_hi = p.rows[end - 1].step_end;
  if (p.num_selected == nullptr) return tile;
  for (int64_t t = begin; t < end; ++t) {
    const int32_t* selected = p.selected.Row<int32_t>(t);
    const int32_t* selected_end = selected + p.num_selected[t];
    CHECK(std::adjacent_find(selected, selected_end, std::greater_equal<int32_t>()) == selected_end)
        << "selection of row " << t << " does not ascend";
    const int32_t* merged_end = std::set_union(scratch.groups, scratch.groups + tile.num_groups,
                                               selected, selected_end, scratch.merged);
    std::swap(scratch.groups, scratch.merged);
    tile.num_groups = merged_end - scratch.groups;
  }
  tile.groups = scratch.groups;
  return tile;
}

TileScratch TakeTileScratch(Arena& arena, const AttentionSizes& sizes, int64_t head_dim) {
  TileScratch scratch;
  scratch.pool = arena.Take<float>(sizes.pool_keys * PoolStride(head_dim));
  scratch.groups = arena.Take<int32_t>(sizes.pool_keys);
  scratch.merged = arena.Take<int32_t>(sizes.pool_keys);
  return scratch;
}

RowScratch TakeRowScratch(Arena& arena,
                          const AttentionSizes& sizes,
                          int64_t num_heads,
                          int64_t head_dim) {
  const int64_t queries = MostQueries(num_heads);
  RowScratch scratch;
  scratch.row_keys = sizes.row_keys;
  scratch.window_stride = sizes.window + 2 * sizes.tile_rows;
  scratch.row_stride = (sizes.row_keys + kPad - 1) / kPad * kPad;
  scratch.keys = arena.Take<const float*>(kMaxTileRows * sizes.row_keys);
  scratch.q = arena.Take<float>(queries * head_dim);
  scratch.window = arena.Take<float>(queries * scratch.window_stride);
  scratch.scores = arena.Take<float>(queries * scratch.row_stride);
  return scratch;
}

void CheckShapes(const AttentionParams& p) {
  CHECK_EQ(p.q.cols, int64_t{p.num_heads} * p.head_dim);
  CHECK_EQ(p.out.cols, p.q.cols);
  CHECK_EQ(p.out.rows, p.q.rows);
  CHECK_EQ(p.ring.cols, p.head_dim);
  CHECK_GT(p.ring_slots, 0);
  if (p.num_selected != nullptr) {
    CHECK_EQ(p.compressed.cols, p.head_dim);
    CHECK(p.selected.dtype == DType::kI32) << DTypeName(p.selected.dtype);
    CHECK_EQ(p.selected.rows, p.q.rows);
    CHECK_GT(p.rows_per_page, 0);
  }
}

// Few tiles: threads share the decoding of each, then split its rows and heads.
void AttendShared(const AttentionParams& p, const AttentionSizes& sizes, const Launch& launch) {
  const Arena::Scope scope(*launch.arena);
  TileScratch tile_scratch = TakeTileScratch(*launch.arena, sizes, p.head_dim);
  RowScratch* row_scratch = launch.arena->Take<RowScratch>(NumThreads(launch));
  for (int i = 0; i < NumThreads(launch); ++i) {
    row_scratch[i] = TakeRowScratch(*launch.arena, sizes, p.num_heads, p.head_dim);
  }
  const int64_t key_grain = RowGrain(0.25 * static_cast<double>(p.head_dim));
  for (int64_t begin = 0, end; begin < p.q.rows; begin = end) {
    end = TileEnd(p, sizes, begin);
    const AttentionTile tile = PlanTile(p, begin, end, tile_scratch);
    CHECK_LE(tile.num_keys(), sizes.pool_keys);
    ParallelRows(launch, tile.num_keys(), key_grain, [&](int64_t from, int64_t to, int) {
      HWY_DYNAMIC_DISPATCH(DecodeKeys)(p, tile, tile_scratch.pool, from, to);
    });
    const int64_t units = (end - begin) * p.num_heads;
    const double unit_ns = 0.05 * static_cast<double>(sizes.row_keys * p.head_dim);
    ParallelRows(launch, units, RowGrain(unit_ns), [&](int64_t from, int64_t to, int thread_idx) {
      while (from < to) {
        // Whole rows together, what is left of a row alone.
        const int64_t t = from / p.num_heads, head = from % p.num_heads;
        const int64_t rows = head == 0 ? std::max<int64_t>(1, (to - from) / p.num_heads) : 1;
        const int64_t heads = std::min<int64_t>(p.num_heads - head, to - from);
        HWY_DYNAMIC_DISPATCH(AttendRows)
        (p, tile, tile_scratch.pool, {begin + t, begin + t + rows, head, head + heads},
         row_scratch[thread_idx]);
        from += rows * heads;
      }
    });
  }
}

// Many rows: every thread takes contiguous rows and cuts them into tiles of its own.
void AttendByTiles(const AttentionParams& p, const AttentionSizes& sizes, const Launch& launch) {
  const Arena::Scope scope(*launch.arena);
  struct ThreadScratch {
    TileScratch tile;
    RowScratch row;
  };
  ThreadScratch* scratch = launch.arena->Take<ThreadScratch>(NumThreads(launch));
  for (int i = 0; i < NumThreads(launch); ++i) {
    scratch[i].tile = TakeTileScratch(*launch.arena, sizes, p.head_dim);
    scratch[i].row = TakeRowScratch(*launch.arena, sizes, p.num_heads, p.head_dim);
  }
  ParallelRows(launch, p.q.rows, sizes.tile_rows, [&](int64_t from, int64_t to, int thread_idx) {
    ThreadScratch& s = scratch[thread_idx];
    for (int64_t begin = from, end; begin < to; begin = end) {
      end = std::min(TileEnd(p, sizes, begin), to);
      const AttentionTile tile = PlanTile(p, begin, end, s.tile);
      CHECK_LE(tile.num_keys(), sizes.pool_keys);
      HWY_DYNAMIC_DISPATCH(DecodeKeys)(p, tile, s.tile.pool, 0, tile.num_keys());
      HWY_DYNAMIC_DISPATCH(AttendRows)
      (p, tile, s.tile.pool, {begin, end, 0, p.num_heads}, s.row);
    }
  });
}

}  // namespace

void AttentionCpu(const AttentionParams& params, const Launch& launch) {
  CheckShapes(params);
  if (params.q.rows == 0) return;
  const AttentionSizes sizes = SizesOf(params);
  if (params.q.rows >= 2 * sizes.tile_rows * NumThreads(launch)) {
    AttendByTiles(params, sizes, launch);
  } else {
    AttendShared(params, sizes, launch);
  }
}

int64_t AttentionScratchBytesCpu(int64_t max_keys, int num_heads, int head_dim, int num_threads) {
  const int64_t pool_keys = std::max(kPoolKeys, max_keys) + 3 * kMaxTileRows;
  constexpr int64_t kF32Bytes = static_cast<int64_t>(sizeof(float));
  const int64_t tile_bytes = pool_keys * (PoolStride(head_dim) + 2) * kF32Bytes;
  const int64_t row_floats = head_dim + (max_keys + 2 * kMaxTileRows) + (max_keys + kPad);
  const int64_t row_bytes = kMaxTileRows * max_keys * static_cast<int64_t>(sizeof(float*)) +
                            MostQueries(num_heads) * row_floats * kF32Bytes;
  constexpr int64_t kAlignSlack = 12 * static_cast<int64_t>(Arena::kAlign);
  return num_threads * (tile_bytes + row_bytes + kAlignSlack);
}

}  // namespace twinspark
#endif  // HWY_ONCE
