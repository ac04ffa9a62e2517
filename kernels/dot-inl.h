// Dot products of many rows with many columns, once per SIMD target: attention's scores, the
// router's gate, the mixes of the residual streams. Lanes run along the sum; every pair has one
// accumulator vector, whose lanes ReduceTree adds in its one order, so a pair has the same bits in
// every tile and block shape.
//
// Up to three rows, and any number with 16 lanes (32 registers): tiles of rows and columns over the
// whole sum at once, read where they lie. Otherwise in pieces: kDotSteps values of kDotRows rows
// are copied (bf16 widened) next to each other, so that they stay in the first-level cache while
// kDotCols columns stream by; the accumulators wait in memory between pieces.

// clang-format off
#if defined(TWINSPARK_KERNELS_DOT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWINSPARK_KERNELS_DOT_INL_H_
#undef TWINSPARK_KERNELS_DOT_INL_H_
#else
#define TWINSPARK_KERNELS_DOT_INL_H_
#endif
// clang-format on

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/unroll.h"
#include "kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {

constexpr int kDotRows = 12;
constexpr int kDotCols = 24;
constexpr int kDotGroup = 8;  // columns whose piece all rows of the block use before the next ones
constexpr int64_t kDotSteps = 256;  // values of a piece
constexpr int kDotFewRows = 3;
constexpr int kDotLanes = static_cast<int>(hn::MaxLanes(DF()));
static_assert(kDotCols % kDotGroup == 0);

// Columns of a tile of kRows rows: at least eight accumulators (a multiply-add takes four cycles,
// two start in each), as many as the 16 or 32 registers hold.
template <int kRows>
constexpr int DotTileCols() {
  if constexpr (kDotLanes >= 16) return kRows <= 3 ? 8 : 4;
  return kRows == 1 ? 8 : (kRows <= 3 ? 4 : 2);
}

// Rows of the next tile where num_rows are left.
constexpr int64_t DotTileRows(int64_t num_rows) {
  return num_rows == 7 || num_rows == 8 ? 4 : std::min<int64_t>(num_rows, 6);
}

// sum[r][j] += a(r) * b(j), lane by lane; a and b load. The side with fewer vectors stays in
// registers, the other comes one at a time.
template <int kRows, int kCols, class LoadA, class LoadB>
HWY_INLINE void DotStep(const LoadA& a, const LoadB& b, VF* sum) {
  if constexpr (kRows <= kCols) {
    VF av[kRows];
    TWINSPARK_UNROLL
    for (int r = 0; r < kRows; ++r)
      av[r] = InRegister(a(r));
    TWINSPARK_UNROLL
    for (int j = 0; j < kCols; ++j) {
      const VF bv = InRegister(b(j));
      TWINSPARK_UNROLL
      for (int r = 0; r < kRows; ++r)
        sum[r * kCols + j] = hn::MulAdd(av[r], bv, sum[r * kCols + j]);
    }
  } else {
    VF bv[kCols];
    TWINSPARK_UNROLL
    for (int j = 0; j < kCols; ++j)
      bv[j] = InRegister(b(j));
    TWINSPARK_UNROLL
    for (int r = 0; r < kRows; ++r) {
      const VF av = InRegister(a(r));
      TWINSPARK_UNROLL
      for (int j = 0; j < kCols; ++j)
        sum[r * kCols + j] = hn::MulAdd(av, bv[j], sum[r * kCols + j]);
    }
  }
}

// sum[r][j] += a[r] . b[j] over `steps` values, lane by lane. a: kRows rows, kDotSteps apart and
// zero up to a whole vector; b: kCols pointers; sum: [kRows][kDotCols] vectors, of which kCols.
template <int kRows, int kCols, class TB>
HWY_INLINE void DotTile(const float* HWY_RESTRICT a,
                        const TB* const* b,
                        int64_t steps,
                        float* HWY_RESTRICT sum) {
  const DF d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto at = [&](int r, int j) { return sum + (r * kDotCols + j) * lanes; };
  VF acc[kRows * kCols];
  TWINSPARK_UNROLL
  for (int r = 0; r < kRows; ++r) {
    TWINSPARK_UNROLL
    for (int j = 0; j < kCols; ++j)
      acc[r * kCols + j] = hn::Load(d, at(r, j));
  }
  const auto load_a = [&](int r, int64_t i) HWY_ATTR { return hn::Load(d, a + r * kDotSteps + i); };
  int64_t i = 0;
  for (; i + lanes <= steps; i += lanes) {
    TWINSPARK_UNROLL
    for (int j = 0; j < kCols; ++j)  // the next piece: too short a run for the hardware to see
      __builtin_prefetch(b[j] + i + kDotSteps, 0, 2);
    DotStep<kRows, kCols>([&](int r) HWY_ATTR { return load_a(r, i); },
                          [&](int j) HWY_ATTR { return LoadF32(d, b[j] + i); }, acc);
  }
  if (i < steps) {
    DotStep<kRows, kCols>([&](int r) HWY_ATTR { return load_a(r, i); },
                          [&](int j) HWY_ATTR { return LoadTail(d, b[j] + i, steps - i); }, acc);
  }
  TWINSPARK_UNROLL
  for (int r = 0; r < kRows; ++r) {
    TWINSPARK_UNROLL
    for (int j = 0; j < kCols; ++j)
      hn::Store(acc[r * kCols + j], d, at(r, j));
  }
}

// kRows rows with the kDotGroup columns of a group.
template <int kRows, class TB>
HWY_INLINE void DotRows(const float* a, const TB* const* b, int64_t steps, float* sum) {
  constexpr int kCols = DotTileCols<kRows>();
  for (int j = 0; j < kDotGroup; j += kCols)
    DotTile<kRows, kCols>(a, b + j, steps, sum + j * kDotLanes);
}

// All rows of a block with a group of columns, in tiles of up to six rows.
template <class TB>
HWY_NOINLINE void DotGroup(
    const float* a, int64_t num_rows, const TB* const* b, int64_t steps, float* sum) {
  while (num_rows > 0) {
    const int64_t rows = DotTileRows(num_rows);
    switch (rows) {
      case 1:
        DotRows<1>(a, b, steps, sum);
        break;
      case 2:
        DotRows<2>(a, b, steps, sum);
        break;
      case 3:
        DotRows<3>(a, b, steps, sum);
        break;
      case 4:
        DotRows<4>(a, b, steps, sum);
        break;
      case 5:
        DotRows<5>(a, b, steps, sum);
        break;
      default:
        DotRows<6>(a, b, steps, sum);
    }
    a += rows * kDotSteps;
    sum += rows * kDotCols * kDotLanes;
    num_rows -= rows;
  }
}

// `steps` values as f32, zeros up to a whole vector.
template <class T>
HWY_INLINE void CopyWhole(const T* from, int64_t steps, float* HWY_RESTRICT to) {
  const DF d;
  int64_t k = 0;
  for (; k + kDotLanes <= steps; k += kDotLanes)
    hn::Store(LoadF32(d, from + k), d, to + k);
  if (k < steps) hn::Store(LoadTail(d, from + k, steps - k), d, to + k);
}

// In pieces; see DotBlock.
template <class A, class B>
HWY_INLINE void DotInPieces(const A& a,
                            int64_t num_rows,
                            const B& b,
                            int64_t num_cols,
                            int64_t n,
                            float* HWY_RESTRICT out,
                            int64_t out_stride) {
  const DF d;
  constexpr int kReduced = std::min(kDotGroup, kDotLanes);  // pairs reduced together
  HWY_ALIGN float rows[kDotRows * kDotSteps];
  HWY_ALIGN float sums[kDotRows * kDotCols * kDotLanes];
  for (int64_t j0 = 0; j0 < num_cols; j0 += kDotCols) {
    const int64_t cols = std::min<int64_t>(kDotCols, num_cols - j0);
    for (int64_t r0 = 0; r0 < num_rows; r0 += kDotRows) {
      const int64_t count = std::min<int64_t>(kDotRows, num_rows - r0);
      std::fill(sums, sums + count * kDotCols * kDotLanes, 0.0f);
      for (int64_t i = 0; i < n; i += kDotSteps) {
        const int64_t steps = std::min(kDotSteps, n - i);
        for (int64_t r = 0; r < count; ++r)
          CopyWhole(a(r0 + r) + i, steps, rows + r * kDotSteps);
        for (int64_t j = 0; j < cols; j += kDotGroup) {
          decltype(b(0)) pointers[kDotGroup];  // the last column again behind the end
          for (int64_t c = 0; c < kDotGroup; ++c)
            pointers[c] = b(j0 + std::min(j + c, cols - 1)) + i;
          DotGroup(rows, count, pointers, steps, sums + j * kDotLanes);
        }
      }
      for (int64_t r = 0; r < count; ++r) {
        for (int64_t j = 0; j < cols; j += kReduced) {
          VF tile[kReduced];
          TWINSPARK_UNROLL
          for (int l = 0; l < kReduced; ++l)
            tile[l] = hn::Load(d, sums + (r * kDotCols + j + l) * kDotLanes);
          HWY_ALIGN float reduced[kDotLanes];
          hn::Store(ReduceTree<kReduced>(d, tile), d, reduced);
          std::copy(reduced, reduced + std::min<int64_t>(kReduced, cols - j),
                    out + (r0 + r) * out_stride + j0 + j);
        }
      }
    }
  }
}

// out[r * out_stride + j] = a[r] . b[j] for kRows rows and the first `count` of kCols columns.
template <int kRows, int kCols, class TA, class TB>
HWY_NOINLINE void DotWhole(const TA* const* a,
                           const TB* const* b,
                           int64_t n,
                           int64_t count,
                           float* HWY_RESTRICT out,
                           int64_t out_stride) {
  const DF d;
  constexpr int kSums = kRows * kCols;
  VF sum[kSums];
  TWINSPARK_UNROLL
  for (int s = 0; s < kSums; ++s)
    sum[s] = hn::Zero(d);
  int64_t i = 0;
  for (; i + kDotLanes <= n; i += kDotLanes) {
    DotStep<kRows, kCols>([&](int r) HWY_ATTR { return LoadF32(d, a[r] + i); },
                          [&](int j) HWY_ATTR { return LoadF32(d, b[j] + i); }, sum);
  }
  if (i < n) {
    DotStep<kRows, kCols>([&](int r) HWY_ATTR { return LoadTail(d, a[r] + i, n - i); },
                          [&](int j) HWY_ATTR { return LoadTail(d, b[j] + i, n - i); }, sum);
  }
  constexpr int kReduced = std::min(kDotLanes, kSums % 8 == 0 ? 8 : 4);
  HWY_ALIGN float reduced[kSums + kDotLanes];
  TWINSPARK_UNROLL
  for (int s = 0; s < kSums; s += kReduced)
    hn::StoreU(ReduceTree<kReduced>(d, sum + s), d, reduced + s);
  for (int r = 0; r < kRows; ++r)
    std::copy(reduced + r * kCols, reduced + r * kCols + count, out + r * out_stride);
}

// All columns with kRows rows.
template <int kRows, class A, class B>
HWY_INLINE void DotRowsWhole(const A& a,
                             const B& b,
                             int64_t num_cols,
                             int64_t n,
                             float* HWY_RESTRICT out,
                             int64_t out_stride) {
  constexpr int kCols = DotTileCols<kRows>();
  decltype(a(0)) rows[kRows];
  for (int r = 0; r < kRows; ++r)
    rows[r] = a(r);
  for (int64_t j = 0; j < num_cols; j += kCols) {
    const int64_t count = std::min<int64_t>(kCols, num_cols - j);
    decltype(b(0)) cols[kCols];  // the last column again behind the end
    for (int64_t c = 0; c < kCols; ++c)
      cols[c] = b(j + std::min(c, count - 1));
    DotWhole<kRows, kCols>(rows, cols, n, count, out + j, out_stride);
  }
}

// out[r * out_stride + j] = a(r) . b(j) over n values; a and b give the r-th and j-th pointer.
template <class A, class B>
HWY_INLINE void DotBlock(const A& a,
                         int64_t num_rows,
                         const B& b,
                         int64_t num_cols,
                         int64_t n,
                         float* HWY_RESTRICT out,
                         int64_t out_stride) {
  if (kDotLanes < 16 && num_rows > kDotFewRows) {
    DotInPieces(a, num_rows, b, num_cols, n, out, out_stride);
    return;
  }
  // A few columns at a time, so that all rows meet them while they are near.
  const int64_t width = num_rows > kDotFewRows ? kDotGroup : num_cols;
  for (int64_t j = 0; j < num_cols; j += width) {
    const int64_t cols = std::min(width, num_cols - j);
    for (int64_t r = 0; r < num_rows;) {
      const int64_t rows = DotTileRows(num_rows - r);
      const auto a_from = [&](int64_t i) { return a(r + i); };
      const auto b_from = [&](int64_t i) { return b(j + i); };
      float* to = out + r * out_stride + j;
      if (rows == 1) DotRowsWhole<1>(a_from, b_from, cols, n, to, out_stride);
      if (rows == 2) DotRowsWhole<2>(a_from, b_from, cols, n, to, out_stride);
      if (rows == 3) DotRowsWhole<3>(a_from, b_from, cols, n, to, out_stride);
      if constexpr (kDotLanes >= 16) {
        if (rows == 4) DotRowsWhole<4>(a_from, b_from, cols, n, to, out_stride);
        if (rows == 5) DotRowsWhole<5>(a_from, b_from, cols, n, to, out_stride);
        if (rows == 6) DotRowsWhole<6>(a_from, b_from, cols, n, to, out_stride);
      }
      r += rows;
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
