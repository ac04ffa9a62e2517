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
#include <functional>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/attention_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/attention/attend_rows-inl.h"
#include "kernels/parallel_rows.h"

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
