// Scores of index keys, once per SIMD target: keys decoded into columns (a lane is a key), queries
// widened, dot products, weights.
//
// Lanes run along keys, so that no sum of lanes is needed; the sums keep the association of
// ReduceTree (vec-inl.h) for a row of keys: one partial sum for every index modulo the number of
// lanes, then neighbours first.

// clang-format off
#if defined(TWINSPARK_KERNELS_INDEXER_SCORE_KEYS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWINSPARK_KERNELS_INDEXER_SCORE_KEYS_INL_H_
#undef TWINSPARK_KERNELS_INDEXER_SCORE_KEYS_INL_H_
#else
#define TWINSPARK_KERNELS_INDEXER_SCORE_KEYS_INL_H_
#endif
// clang-format on

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "hwy/highway.h"
#include "kernels/indexer/index_select.h"
#include "kernels/indexer/select_scratch.h"
#include "kernels/parallel_rows.h"
#include "kernels/quant/codec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {

constexpr int kLanes = static_cast<int>(hn::MaxLanes(DF()));
constexpr int kKeyVecs = 2;
constexpr int64_t kKeyBlock = int64_t{kKeyVecs} * kLanes;  // keys whose values are neighbours
static_assert(kKeyTile % kKeyBlock == 0 && kLanes <= kMostLanes);

// Keys into columns: keys[dim][kKeyBlock] of one block.

#if HWY_TARGET <= HWY_AVX2
using VU = hn::Vec<hn::RebindToUnsigned<DF>>;

// 16 bytes of row k in the first four lanes, of row k + 4 in the next, and so on.
HWY_INLINE VU LoadPieces(const uint8_t* const* rows, int k, int64_t at) {
  const auto piece = [&](int row) HWY_ATTR {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + at));
  };
#if HWY_TARGET == HWY_AVX2
  return VU{_mm256_inserti128_si256(_mm256_castsi128_si256(piece(k)), piece(k + 4), 1)};
#else
  const __m512i two = _mm512_inserti32x4(_mm512_castsi128_si512(piece(k)), piece(k + 4), 1);
  return VU{_mm512_inserti32x4(_mm512_inserti32x4(two, piece(k + 8), 2), piece(k + 12), 3)};
#endif
}

// words[w], lane k: word w of the 16 bytes of row k.
HWY_INLINE void LoadWordsOfRows(const uint8_t* const* rows, int64_t at, VU* words) {
  const hn::RebindToUnsigned<DF> du;
  const hn::Repartition<uint64_t, DF> d64;
  const VU a = LoadPieces(rows, 0, at), b = LoadPieces(rows, 1, at);
  const VU c = LoadPieces(rows, 2, at), e = LoadPieces(rows, 3, at);
  const auto ab = hn::BitCast(d64, hn::InterleaveLower(du, a, b));
  const auto ce = hn::BitCast(d64, hn::InterleaveLower(du, c, e));
  const auto ab2 = hn::BitCast(d64, hn::InterleaveUpper(du, a, b));
  const auto ce2 = hn::BitCast(d64, hn::InterleaveUpper(du, c, e));
  words[0] = hn::BitCast(du, hn::InterleaveLower(d64, ab, ce));
  words[1] = hn::BitCast(du, hn::InterleaveUpper(d64, ab, ce));
  words[2] = hn::BitCast(du, hn::InterleaveLower(d64, ab2, ce2));
  words[3] = hn::BitCast(du, hn::InterleaveUpper(d64, ab2, ce2));
}

// kLanes rows of e2m1 codes with e8m0 scales, `stride` columns apart: eight codes of a row are one
// number; lane k of a vector is the number of row k, whose nibbles are then looked up.
inline void DecodeColumns(const uint8_t* const* rows, int64_t dim, float* columns) {
  const DF d;
  const hn::RebindToUnsigned<DF> du;
  constexpr int64_t kCodes = 8;  // of a number
  constexpr int64_t kScales = 4;
  const int64_t group = CacheGroup(CacheFormat::kQ4E8);
  const int64_t num_groups = dim / group;
  for (int64_t first = 0; first < num_groups; first += kScales) {
    // The bytes of up to four scales of every row, the lowest the next.
    HWY_ALIGN uint32_t bytes[kLanes] = {};
    const int64_t count = std::min(kScales, num_groups - first);
    for (int k = 0; k < kLanes; ++k) {
      const uint8_t* from = rows[k] + dim / 2 + first;
      if (count == kScales) {
        std::memcpy(&bytes[k], from, kScales);
      } else {
        std::memcpy(&bytes[k], from, static_cast<size_t>(count));
      }
    }
    VU scales = hn::Load(du, bytes);
    for (int64_t g = first; g < first + count; ++g) {
      const VF scale =
          hn::BitCast(d, hn::ShiftLeft<23>(hn::And(scales, hn::Set(du, uint32_t{0xff}))));
      scales = hn::ShiftRight<8>(scales);
      VU words[4];
      LoadWordsOfRows(rows, g * group / 2, words);
      TWINSPARK_UNROLL
      for (int w = 0; w < 4; ++w) {
        const VU word = words[w];
        float* out = columns + (g * group + w * kCodes) * kKeyBlock;
        const auto decode = [&](auto bits, int64_t c) HWY_ATTR {
          hn::Store(hn::Mul(LookUpE2M1(d, bits), scale), d, out + c * kKeyBlock);
        };
        decode(word, 0);
        decode(hn::ShiftRight<4>(word), 1);
        decode(hn::ShiftRight<8>(word), 2);
        decode(hn::ShiftRight<12>(word), 3);
        decode(hn::ShiftRight<16>(word), 4);
        decode(hn::ShiftRight<20>(word), 5);
        decode(hn::ShiftRight<24>(word), 6);
        decode(hn::ShiftRight<28>(word), 7);
      }
    }
  }
}
#endif

// Four decoded rows into four columns.
inline void Transpose(const float* rows, int64_t dim, float* columns) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const hn::FixedTag<float, 4> d4;
  const hn::FixedTag<uint64_t, 2> d2;
  for (; i + 4 <= dim; i += 4) {
    const auto a = hn::LoadU(d4, rows + i), b = hn::LoadU(d4, rows + dim + i);
    const auto c = hn::LoadU(d4, rows + 2 * dim + i), e = hn::LoadU(d4, rows + 3 * dim + i);
    const auto ab = hn::BitCast(d2, hn::InterleaveLower(d4, a, b));
    const auto ce = hn::BitCast(d2, hn::InterleaveLower(d4, c, e));
    const auto ab2 = hn::BitCast(d2, hn::InterleaveUpper(d4, a, b));
    const auto ce2 = hn::BitCast(d2, hn::InterleaveUpper(d4, c, e));
    float* out = columns + i * kKeyBlock;
    hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, ab, ce)), d4, out);
    hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, ab, ce)), d4, out + kKeyBlock);
    hn::StoreU(hn::BitCast(d4, hn::InterleaveLower(d2, ab2, ce2)), d4, out + 2 * kKeyBlock);
    hn::StoreU(hn::BitCast(d4, hn::InterleaveUpper(d2, ab2, ce2)), d4, out + 3 * kKeyBlock);
  }
#endif
  for (; i < dim; ++i) {
    for (int k = 0; k < std::min<int64_t>(4, kKeyBlock); ++k)
      columns[i * kKeyBlock + k] = rows[k * dim + i];
  }
}

// Groups [begin, end), at most kKeyTile, into s.keys.
inline void DecodeIndexKeys(const IndexSelectParams& p,
                            const int32_t* pages,
                            int64_t begin,
                            int64_t end,
                            const SelectScratch& s) {
  const int64_t row_bytes = p.keys.row_bytes();
  const int64_t padded = RoundUp(p.dim, kLanes);
  const auto row_of = [&](int64_t g) {
    g = std::min(g, end - 1);  // blocks are whole: the last key again behind the end
    const int64_t row = int64_t{pages[g / p.rows_per_page]} * p.rows_per_page + g % p.rows_per_page;
    CHECK(row >= 0 && row < p.keys.num_rows) << row << " of " << p.keys.num_rows;
    return static_cast<const uint8_t*>(p.keys.data) + row * row_bytes;
  };
  for (int64_t g = begin; g < end; g += kKeyBlock) {
    float* block = s.keys + (g - begin) * padded;
    std::fill(block + p.dim * kKeyBlock, block + padded * kKeyBlock, 0.0f);
#if HWY_TARGET <= HWY_AVX2
    if (p.keys.format == CacheFormat::kQ4E8) {
      for (int64_t v = 0; v < kKeyVecs; ++v) {
        const uint8_t* rows[kLanes];
        for (int64_t k = 0; k < kLanes; ++k)
          rows[k] = row_of(g + v * kLanes + k);
        DecodeColumns(rows, p.dim, block + v * kLanes);
      }
      continue;
    }
#endif
    constexpr int64_t kRows = std::min<int64_t>(4, kKeyBlock);
    for (int64_t k = 0; k < kKeyBlock; k += kRows) {
      for (int64_t r = 0; r < kRows; ++r)
        DecodeRow(p.keys.format, row_of(g + k + r), p.dim, s.row + r * p.dim);
      Transpose(s.row, p.dim, block + k);
    }
  }
}

// The row's queries and scaled weights as f32; heads and dim padded with zeros.
inline void LoadQuery(const IndexSelectParams& p, int64_t t, float* q, float* weights) {
  const DF d;
  const int64_t padded = RoundUp(p.dim, kLanes);
  WithFloatType(p.q.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t h = 0; h < p.num_heads; ++h) {
      const T* from = p.q.Row<T>(t) + h * p.dim;
      float* to = q + h * padded;
      ForVectors(d, p.dim,
                 [&](const auto& load, const auto& store) HWY_ATTR { store(load(from), to); });
      std::fill(to + p.dim, to + padded, 0.0f);
    }
  });
  std::fill(q + p.num_heads * padded, q + RoundUp(p.num_heads, kHeadTile) * padded, 0.0f);
  WithFloatType(p.weights.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int h = 0; h < p.num_heads; ++h) {
      weights[h] = ToF32(p.weights.Row<T>(t)[h]) * p.weight_scale;
    }
  });
}

// dots[h][v]: products of kHeads heads with the keys of a block. Partial sums of neighbouring
// residues are added as soon as both are there, as digits carry in a binary counter.
template <int kHeads>
HWY_INLINE void DotKeys(const float* HWY_RESTRICT q,
                        const float* HWY_RESTRICT keys,
                        int64_t dim,
                        VF* HWY_RESTRICT dots) {
  const DF d;
  constexpr int kSums = kHeads * kKeyVecs;
  constexpr int kLevels = std::bit_width(static_cast<unsigned>(kLanes));
  HWY_ALIGN float waiting[kLevels][kSums * kLanes];
  for (int64_t residue = 0; residue < kLanes; ++residue) {
    VF sum[kSums];
    TWINSPARK_UNROLL
    for (int s = 0; s < kSums; ++s)
      sum[s] = hn::Zero(d);
    for (int64_t i = residue; i < dim; i += kLanes) {
      VF key[kKeyVecs];
      TWINSPARK_UNROLL
      for (int v = 0; v < kKeyVecs; ++v)
        key[v] = InRegister(hn::Load(d, keys + i * kKeyBlock + v * kLanes));
      TWINSPARK_UNROLL
      for (int h = 0; h < kHeads; ++h) {
        const VF value = InRegister(hn::Set(d, q[h * dim + i]));
        TWINSPARK_UNROLL
        for (int v = 0; v < kKeyVecs; ++v)
          sum[h * kKeyVecs + v] = hn::MulAdd(value, key[v], sum[h * kKeyVecs + v]);
      }
    }
    int level = 0;
    for (; ((residue >> level) & 1) != 0; ++level) {
      TWINSPARK_UNROLL
      for (int s = 0; s < kSums; ++s)
        sum[s] = hn::Add(hn::Load(d, waiting[level] + s * kLanes), sum[s]);
    }
    TWINSPARK_UNROLL
    for (int s = 0; s < kSums; ++s)
      hn::Store(sum[s], d, waiting[level] + s * kLanes);
  }
  TWINSPARK_UNROLL
  for (int s = 0; s < kSums; ++s)
    dots[s] = hn::Load(d, waiting[kLevels - 1] + s * kLanes);
}

// score += weights[h] * max(0, dot) for heads in ascending order.
template <int kHeads>
HWY_INLINE void AddHeads(const float* q,
                         const float* keys,
                         int64_t dim,
                         const float* weights,
                         int64_t num_heads,
                         VF* score) {
  const DF d;
  VF dots[kHeads * kKeyVecs];
  DotKeys<kHeads>(q, keys, dim, dots);
  TWINSPARK_UNROLL
  for (int h = 0; h < kHeads; ++h) {
    if (h >= num_heads) return;
    TWINSPARK_UNROLL
    for (int v = 0; v < kKeyVecs; ++v) {
      const VF relu = hn::Max(dots[h * kKeyVecs + v], hn::Zero(d));
      score[v] = hn::MulAdd(hn::Set(d, weights[h]), relu, score[v]);
    }
  }
}

// scores[i] of the first `count` keys in `keys`; whole blocks are written.
inline void ScoreKeys(const IndexSelectParams& p,
                      const float* q,
                      const float* weights,
                      const float* keys,
                      int64_t count,
                      float* scores) {
  const DF d;
  const int64_t dim = RoundUp(p.dim, kLanes);
  constexpr int kManyHeads = kLanes >= 16 ? 8 : 4;  // as the number of registers allows
  for (int64_t k = 0; k < count; k += kKeyBlock) {
    const float* block = keys + k * dim;
    VF score[kKeyVecs];
    TWINSPARK_UNROLL
    for (int v = 0; v < kKeyVecs; ++v)
      score[v] = hn::Zero(d);
    int64_t h = 0;
    for (; h + kManyHeads <= p.num_heads; h += kManyHeads)
      AddHeads<kManyHeads>(q + h * dim, block, dim, weights + h, kManyHeads, score);
    for (; h < p.num_heads; h += kHeadTile)
      AddHeads<kHeadTile>(q + h * dim, block, dim, weights + h, p.num_heads - h, score);
    TWINSPARK_UNROLL
    for (int v = 0; v < kKeyVecs; ++v)
      hn::Store(score[v], d, scores + k + v * kLanes);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
