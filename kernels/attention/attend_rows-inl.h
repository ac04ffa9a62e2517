// The arithmetic of attention over the decoded keys of a tile, once per SIMD target: decoding,
// scores, softmax, values. An output is one chain of FMAs over the row's key list, so neither the
// tiling nor the threads can change it.

// clang-format off
#if defined(TWINSPARK_KERNELS_ATTENTION_ATTEND_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWINSPARK_KERNELS_ATTENTION_ATTEND_ROWS_INL_H_
#undef TWINSPARK_KERNELS_ATTENTION_ATTEND_ROWS_INL_H_
#else
#define TWINSPARK_KERNELS_ATTENTION_ATTEND_ROWS_INL_H_
#endif
// clang-format on

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/attention/attention.h"
#include "kernels/attention/attention_tile.h"
#include "kernels/dot-inl.h"
#include "kernels/exp-inl.h"
#include "kernels/parallel_rows.h"
#include "kernels/quant/codec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {

// Decodes pool rows [begin, end) of a tile.
inline void DecodeKeys(
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
inline float SoftmaxRow(float* scores, int64_t num_keys, float scale, float sink, bool round) {
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
inline HWY_NOINLINE void AddKeysOfHeads(const float* const* keys,
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
inline int64_t ListKeys(const AttentionParams& p,
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
inline void ScoreWindow(const AttentionParams& p,
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
inline void ScoreRow(const AttentionParams& p,
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

inline void AttendPairs(const AttentionParams& p,
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
inline void AttendRows(const AttentionParams& p,
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

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
