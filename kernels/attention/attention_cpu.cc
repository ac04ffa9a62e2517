// Attention on the CPU. Neighbouring rows of one sequence form a tile: the keys that any of them
// sees are decoded once into an f32 pool (the values are the same either way), then every row walks
// its own list of pool rows. With many tiles threads take whole tiles; with few (decode) they share
// the decoding and then split rows and heads. An output is one chain of FMAs over the row's key
// list, so neither the tiling nor the threads can change it.
//
// Cost per row and head: 4 * num_keys * head_dim flops; bytes: pool rows, read twice from L2.
#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/attention/attention_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/exp-inl.h"
#include "kernels/parallel_rows.h"
#include "kernels/quant/codec-inl.h"

#ifndef TWINSPARK_KERNELS_ATTENTION_TILE_
#define TWINSPARK_KERNELS_ATTENTION_TILE_
namespace twinspark {
namespace {

constexpr int64_t kMaxTileRows = 8;
constexpr int64_t kPoolKeys = 1024;  // tiles grow up to this many keys (2 MiB at head_dim 512)
constexpr int64_t kScorePad = 16;    // score rows are padded to whole vectors

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

struct TileScratch {
  float* pool = nullptr;      // [pool_keys, head_dim]
  int32_t* groups = nullptr;  // [pool_keys]
  int32_t* merged = nullptr;  // [pool_keys]
};

// Scratch of one thread that computes rows.
struct RowScratch {
  const float** keys = nullptr;  // [max_row_keys]
  float* scores = nullptr;       // [num_heads, padded max_row_keys]
  float* q = nullptr;            // [num_heads, head_dim], f32
  float* sums = nullptr;         // [num_heads, head_dim]
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
  const auto row_of = [](const CacheRows& store, int64_t row) {
    CHECK(row >= 0 && row < store.num_rows) << row << " of " << store.num_rows;
    return static_cast<const uint8_t*>(store.data) + row * store.row_bytes();
  };
  for (int64_t k = begin; k < end; ++k) {
    float* out = pool + k * cols;
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

// sums[h][c .. c + kVecs vectors) += sum_k e[h][k] * keys[k][c ..] for kHeads heads.
template <int kHeads, int kVecs>
HWY_INLINE void AddKeys(const float* const* keys,
                        int64_t num_keys,
                        const float* e,
                        int64_t e_stride,
                        int64_t c,
                        float* sums,
                        int64_t sums_stride) {
  const DF d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  VF acc[kHeads * kVecs];
  TWINSPARK_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    TWINSPARK_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      acc[h * kVecs + v] = hn::LoadU(d, sums + h * sums_stride + c + v * lanes);
    }
  }
  for (int64_t k = 0; k < num_keys; ++k) {
    VF key[kVecs];
    TWINSPARK_UNROLL
    for (int v = 0; v < kVecs; ++v)
      key[v] = hn::LoadU(d, keys[k] + c + v * lanes);
    TWINSPARK_UNROLL
    for (int h = 0; h < kHeads; ++h) {
      const VF weight = hn::Set(d, e[h * e_stride + k]);
      TWINSPARK_UNROLL
      for (int v = 0; v < kVecs; ++v) {
        acc[h * kVecs + v] = hn::MulAdd(weight, key[v], acc[h * kVecs + v]);
      }
    }
  }
  TWINSPARK_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    TWINSPARK_UNROLL
    for (int v = 0; v < kVecs; ++v) {
      hn::StoreU(acc[h * kVecs + v], d, sums + h * sums_stride + c + v * lanes);
    }
  }
}

template <int kHeads>
HWY_INLINE void AddKeysAllColumns(const float* const* keys,
                                  int64_t num_keys,
                                  const float* e,
                                  int64_t e_stride,
                                  int64_t head_dim,
                                  float* sums) {
  constexpr int kVecs = hn::MaxLanes(DF()) >= 16 ? 4 : 2;
  const DF d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  int64_t c = 0;
  for (; c + kVecs * lanes <= head_dim; c += kVecs * lanes) {
    AddKeys<kHeads, kVecs>(keys, num_keys, e, e_stride, c, sums, head_dim);
  }
  for (; c + lanes <= head_dim; c += lanes) {
    AddKeys<kHeads, 1>(keys, num_keys, e, e_stride, c, sums, head_dim);
  }
  if (c == head_dim) return;
  const int64_t rest = head_dim - c;
  for (int h = 0; h < kHeads; ++h) {
    VF acc = LoadTail(d, sums + h * head_dim + c, rest);
    for (int64_t k = 0; k < num_keys; ++k) {
      acc = hn::MulAdd(hn::Set(d, e[h * e_stride + k]), LoadTail(d, keys[k] + c, rest), acc);
    }
    StoreTail(acc, d, sums + h * head_dim + c, rest);
  }
}

// Values of all keys for num_heads heads; keys in tiles that stay in L1 for all heads.
void WeightedSum(const float* const* keys,
                 int64_t num_keys,
                 const float* e,
                 int64_t e_stride,
                 int64_t num_heads,
                 int64_t head_dim,
                 float* sums) {
  constexpr int64_t kKeyTile = 8;
  std::fill(sums, sums + num_heads * head_dim, 0.0f);
  for (int64_t k = 0; k < num_keys; k += kKeyTile) {
    const int64_t count = std::min(kKeyTile, num_keys - k);
    int64_t h = 0;
    for (; h + 4 <= num_heads; h += 4) {
      AddKeysAllColumns<4>(keys + k, count, e + h * e_stride + k, e_stride, head_dim,
                           sums + h * head_dim);
    }
    for (; h + 2 <= num_heads; h += 2) {
      AddKeysAllColumns<2>(keys + k, count, e + h * e_stride + k, e_stride, head_dim,
                           sums + h * head_dim);
    }
    for (; h < num_heads; ++h) {
      AddKeysAllColumns<1>(keys + k, count, e + h * e_stride + k, e_stride, head_dim,
                           sums + h * head_dim);
    }
  }
}

// The row's key list in pool rows.
int64_t ListKeys(const AttentionParams& p,
                 const AttentionTile& tile,
                 const float* pool,
                 int64_t t,
                 const float** keys) {
  const AttentionRow& row = p.rows[t];
  int64_t count = 0;
  for (int64_t pos = row.ring_begin; pos < row.ring_end; ++pos) {
    keys[count++] = pool + (pos - tile.ring_lo) * p.head_dim;
  }
  const float* step_pool = pool + tile.num_ring() * p.head_dim;
  for (int64_t i = row.step_begin; i < row.step_end; ++i) {
    keys[count++] = step_pool + (i - tile.step_lo) * p.head_dim;
  }
  if (p.num_selected == nullptr) return count;
  const float* group_pool = step_pool + tile.num_step() * p.head_dim;
  const int32_t* selected = p.selected.Row<int32_t>(t);
  int64_t slot = 0;
  for (int32_t i = 0; i < p.num_selected[t]; ++i) {
    while (tile.groups[slot] != selected[i])
      ++slot;  // both ascend
    keys[count++] = group_pool + slot * p.head_dim;
  }
  return count;
}

template <class Q, class Out>
void AttendRowTyped(const AttentionParams& p,
                    const AttentionTile& tile,
                    const float* pool,
                    int64_t t,
                    int64_t head_begin,
                    int64_t head_end,
                    const RowScratch& s) {
  const DF d;
  const int64_t num_heads = head_end - head_begin;
  const int64_t head_dim = p.head_dim;
  const int64_t num_keys = ListKeys(p, tile, pool, t, s.keys);
  const Q* q = p.q.Row<Q>(t) + head_begin * head_dim;
  Out* out = p.out.Row<Out>(t) + head_begin * head_dim;
  if (num_keys == 0) {
    std::fill(out, out + num_heads * head_dim, Out{});
    return;
  }
  ForVectors(d, num_heads * head_dim,
             [&](const auto& load, const auto& store) HWY_ATTR { store(load(q), s.q); });
  const int64_t stride = static_cast<int64_t>(
      hwy::RoundUpTo(static_cast<size_t>(num_keys), static_cast<size_t>(kScorePad)));
  DotBlock([&](int64_t h) { return static_cast<const float*>(s.q + h * head_dim); }, num_heads,
           [&](int64_t k) { return s.keys[k]; }, num_keys, head_dim, s.scores, stride);
  float denominators[64];
  CHECK_LE(num_heads, 64);
  for (int64_t h = 0; h < num_heads; ++h) {
    denominators[h] = SoftmaxRow(s.scores + h * stride, num_keys, p.scale, p.sink[head_begin + h],
                                 p.round_probabilities);
  }
  WeightedSum(s.keys, num_keys, s.scores, stride, num_heads, head_dim, s.sums);
  for (int64_t h = 0; h < num_heads; ++h) {
    const VF denominator = hn::Set(d, denominators[h]);
    const float* sums = s.sums + h * head_dim;
    Out* head_out = out + h * head_dim;
    ForVectors(d, head_dim, [&](const auto& load, const auto& store) HWY_ATTR {
      store(hn::Div(load(sums), denominator), head_out);
    });
  }
}

void AttendRow(const AttentionParams& p,
               const AttentionTile& tile,
               const float* pool,
               int64_t t,
               int64_t head_begin,
               int64_t head_end,
               const RowScratch& s) {
  constexpr int64_t kHeadsAtOnce = 64;
  for (int64_t h = head_begin; h < head_end; h += kHeadsAtOnce) {
    const int64_t stop = std::min(head_end, h + kHeadsAtOnce);
    WithFloatType(p.q.dtype, [&](auto* q_type) {
      WithFloatType(p.out.dtype, [&](auto* out_type) {
        using Q = std::remove_pointer_t<decltype(q_type)>;
        using Out = std::remove_pointer_t<decltype(out_type)>;
        AttendRowTyped<Q, Out>(p, tile, pool, t, h, stop, s);
      });
    });
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
HWY_EXPORT(AttendRow);

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
  scratch.pool = arena.Take<float>(sizes.pool_keys * head_dim);
  scratch.groups = arena.Take<int32_t>(sizes.pool_keys);
  scratch.merged = arena.Take<int32_t>(sizes.pool_keys);
  return scratch;
}

RowScratch TakeRowScratch(Arena& arena, int64_t row_keys, int64_t num_heads, int64_t head_dim) {
  RowScratch scratch;
  scratch.keys = arena.Take<const float*>(row_keys);
  scratch.scores = arena.Take<float>(num_heads * (row_keys + kScorePad));
  scratch.q = arena.Take<float>(num_heads * head_dim);
  scratch.sums = arena.Take<float>(num_heads * head_dim);
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
    row_scratch[i] = TakeRowScratch(*launch.arena, sizes.row_keys, p.num_heads, p.head_dim);
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
        const int64_t t = from / p.num_heads, head = from % p.num_heads;
        const int64_t head_end = std::min<int64_t>(p.num_heads, head + to - from);
        HWY_DYNAMIC_DISPATCH(AttendRow)
        (p, tile, tile_scratch.pool, begin + t, head, head_end, row_scratch[thread_idx]);
        from += head_end - head;
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
    scratch[i].row = TakeRowScratch(*launch.arena, sizes.row_keys, p.num_heads, p.head_dim);
  }
  ParallelRows(launch, p.q.rows, sizes.tile_rows, [&](int64_t from, int64_t to, int thread_idx) {
    ThreadScratch& s = scratch[thread_idx];
    for (int64_t begin = from, end; begin < to; begin = end) {
      end = std::min(TileEnd(p, sizes, begin), to);
      const AttentionTile tile = PlanTile(p, begin, end, s.tile);
      CHECK_LE(tile.num_keys(), sizes.pool_keys);
      HWY_DYNAMIC_DISPATCH(DecodeKeys)(p, tile, s.tile.pool, 0, tile.num_keys());
      for (int64_t t = begin; t < end; ++t) {
        HWY_DYNAMIC_DISPATCH(AttendRow)(p, tile, s.tile.pool, t, 0, p.num_heads, s.row);
      }
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
  const int64_t tile_bytes = pool_keys * (head_dim + 2) * kF32Bytes;
  const int64_t row_bytes = max_keys * static_cast<int64_t>(sizeof(float*)) +
                            num_heads * (max_keys + kScorePad + 2 * head_dim) * kF32Bytes;
  constexpr int64_t kAlignSlack = 12 * static_cast<int64_t>(Arena::kAlign);
  return num_threads * (tile_bytes + row_bytes + kAlignSlack);
}

}  // namespace twinspark
#endif  // HWY_ONCE
