// Index scores and selection on the CPU. Tiles of rows of one sequence share decoded keys, one tile
// of keys at a time; scores stream into a bounded set of the best so far (TopSet), so memory does
// not grow with the context. Cost per row: 2 * num_heads * dim * num_visible flops.
//
// Lanes run along keys, so that no sum of lanes is needed; the sums keep the association of
// ReduceTree (vec-inl.h) for a row of keys: one partial sum for every index modulo the number of
// lanes, then neighbours first.
#include "kernels/indexer/index_select.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/indexer/index_select_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/parallel_rows.h"
#include "kernels/quant/codec-inl.h"

#ifndef TWINSPARK_KERNELS_INDEXER_TOP_SET_
#define TWINSPARK_KERNELS_INDEXER_TOP_SET_
namespace twinspark {
namespace {

constexpr int64_t kKeyTile = 64;  // groups scored at a time
constexpr int64_t kMaxTileRows = 16;
constexpr int64_t kMostLanes = 16;
constexpr int64_t kHeadTile = 4;
constexpr float kMasked = -std::numeric_limits<float>::infinity();

constexpr int64_t RoundUp(int64_t count, int64_t to) {
  return (count + to - 1) / to * to;
}

// Keeps the best `capacity` of a stream of scores whose indices ascend: the higher score, among
// equals the lower index. Scores that cannot be among them any more are skipped by one comparison;
// the rest gather in order and are pruned whenever twice the capacity is there.
struct TopSet {
  int32_t* keys = nullptr;     // [Room(capacity)], ordered as the scores are
  int32_t* indices = nullptr;  // [Room(capacity)], ascending
  int64_t capacity = 0;
  int64_t count = 0;
  float floor = kMasked;

  // A tile of scores more than twice the capacity, and a vector that is stored whole.
  static int64_t Room(int64_t capacity) { return 2 * capacity + kKeyTile + kMostLanes; }
  void Reset() {
    count = 0;
    floor = kMasked;
  }
};

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

}  // namespace
}  // namespace twinspark
#endif  // TWINSPARK_KERNELS_INDEXER_TOP_SET_

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

constexpr int kLanes = static_cast<int>(hn::MaxLanes(DF()));
constexpr int kKeyVecs = 2;
constexpr int64_t kKeyBlock = int64_t{kKeyVecs} * kLanes;  // keys whose values are neighbours
static_assert(kKeyTile % kKeyBlock == 0 && kLanes <= kMostLanes);

// ------------------------------------------------------------------------------------------------
// Keys into columns: keys[dim][kKeyBlock] of one block.

#if HWY_TARGET <= HWY_AVX2
// kLanes rows of e2m1 codes with e8m0 scales, `stride` columns apart: eight codes of a row are one
// number; lane k of a vector is the number of row k, whose nibbles are then looked up.
void DecodeColumns(const uint8_t* const* rows, int64_t dim, float* columns) {
  const DF d;
  const hn::RebindToUnsigned<DF> du;
  constexpr int64_t kCodes = 8;  // of a number
  const int64_t group = CacheGroup(CacheFormat::kQ4E8);
  for (int64_t i = 0; i < dim; i += group) {
    HWY_ALIGN uint32_t words[4][kLanes];
    HWY_ALIGN uint32_t scales[kLanes];
    for (int k = 0; k < kLanes; ++k) {
      uint32_t of_row[4];
      std::memcpy(of_row, rows[k] + i / 2, sizeof(of_row));
      for (int w = 0; w < 4; ++w)
        words[w][k] = of_row[w];
      scales[k] = uint32_t{rows[k][dim / 2 + i / group]} << 23;
    }
    const VF scale = hn::BitCast(d, hn::Load(du, scales));
    for (int w = 0; w < 4; ++w) {
      const auto word = hn::Load(du, words[w]);
      float* out = columns + (i + w * kCodes) * kKeyBlock;
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
#endif

// Four decoded rows into four columns.
void Transpose(const float* rows, int64_t dim, float* columns) {
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
void DecodeIndexKeys(const IndexSelectParams& p,
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

// ------------------------------------------------------------------------------------------------
// Scores

// The row's queries and scaled weights as f32; heads and dim padded with zeros.
void LoadQuery(const IndexSelectParams& p, int64_t t, float* q, float* weights) {
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
void ScoreKeys(const IndexSelectParams& p,
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

// ------------------------------------------------------------------------------------------------
// The best of a stream

// Integers ordered as scores are (-0 as 0), and back.
HWY_INLINE hn::Vec<hn::RebindToSigned<DF>> OrderedKeys(DF d, VF score) {
  const hn::RebindToSigned<DF> di;
  const auto bits = hn::BitCast(di, hn::Add(score, hn::Zero(d)));
  return hn::Xor(bits, hn::And(hn::BroadcastSignBit(bits), hn::Set(di, 0x7fffffff)));
}
float ScoreOf(int32_t key) {
  return std::bit_cast<float>(key < 0 ? key ^ 0x7fffffff : key);
}

// Stores the lanes of `keep` next to each other, whole vectors; returns how many. (Compressed in a
// register: the form that stores takes a hundred cycles on Zen 4.)
template <class V, class M>
HWY_INLINE int64_t StoreKept(V keys, V indices, M keep, int32_t* to_keys, int32_t* to_indices) {
  const hn::RebindToSigned<DF> di;
  hn::StoreU(hn::Compress(keys, keep), di, to_keys);
  hn::StoreU(hn::Compress(indices, keep), di, to_indices);
  return static_cast<int64_t>(hn::CountTrue(di, keep));
}

int64_t CountAtLeast(const TopSet& set, int32_t key) {
  const hn::RebindToSigned<DF> di;
  const auto least = hn::Set(di, key);
  int64_t i = 0, found = 0;
  for (; i + kLanes <= set.count; i += kLanes)
    found += kLanes -
             static_cast<int64_t>(hn::CountTrue(di, hn::Lt(hn::LoadU(di, set.keys + i), least)));
  for (; i < set.count; ++i)
    found += set.keys[i] >= key ? 1 : 0;
  return found;
}

// Leaves the best `capacity`, still in order. The key that divides them is found bit by bit, from
// the top; among those equal to it the first ones stay.
void Prune(TopSet& set) {
  if (set.count <= set.capacity) return;
  uint32_t least = 0;  // keys with the sign bit flipped are unsigned numbers in the same order
  int64_t kept = set.count;
  for (uint32_t bit = 1u << 31; bit != 0 && kept != set.capacity; bit >>= 1) {
    const int64_t found = CountAtLeast(set, static_cast<int32_t>((least | bit) ^ 0x80000000u));
    if (found < set.capacity) continue;
    least |= bit;
    kept = found;
  }
  const int32_t dividing = static_cast<int32_t>(least ^ 0x80000000u);
  const int64_t surplus = kept - set.capacity;  // of scores equal to the dividing one
  int64_t count = 0, i = 0;
  if (surplus == 0) {
    const hn::RebindToSigned<DF> di;
    for (; i + kLanes <= set.count; i += kLanes) {
      const auto keys = hn::LoadU(di, set.keys + i), indices = hn::LoadU(di, set.indices + i);
      const auto keep = hn::Not(hn::Lt(keys, hn::Set(di, dividing)));
      count += StoreKept(keys, indices, keep, set.keys + count, set.indices + count);
    }
  }
  int64_t allowed = std::numeric_limits<int64_t>::max();
  if (surplus > 0) allowed = set.capacity - CountAtLeast(set, dividing + 1);
  for (; i < set.count; ++i) {
    const int32_t key = set.keys[i];
    if (key < dividing || (key == dividing && allowed-- <= 0)) continue;
    set.keys[count] = key;
    set.indices[count++] = set.indices[i];
  }
  set.count = count;
  set.floor = ScoreOf(dividing);  // at most the lowest that is kept
}

// Offers scores[0 .. count) of the indices from `first` on; count <= kKeyTile. The scores may be
// read, as masked, up to a whole vector.
void AddScores(TopSet& set, float* scores, int64_t first, int64_t count) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  std::fill(scores + count, scores + RoundUp(count, kLanes), kMasked);
  const VF floor = hn::Set(d, set.floor);
  for (int64_t i = 0; i < count; i += kLanes) {
    const VF score = hn::LoadU(d, scores + i);
    const auto enters = hn::Gt(score, floor);
    if (hn::AllFalse(d, enters)) continue;
    const auto mask = hn::RebindMask(di, enters);
    const auto indices = hn::Iota(di, static_cast<int32_t>(first + i));
    set.count += StoreKept(OrderedKeys(d, score), indices, mask, set.keys + set.count,
                           set.indices + set.count);
  }
  if (set.count >= 2 * set.capacity) Prune(set);
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
namespace {

HWY_EXPORT(DecodeIndexKeys);
HWY_EXPORT(LoadQuery);
HWY_EXPORT(ScoreKeys);
HWY_EXPORT(AddScores);
HWY_EXPORT(Prune);

// The best, as ascending indices; returns how many.
int32_t Finish(TopSet& set, int32_t* indices) {
  HWY_DYNAMIC_DISPATCH(Prune)(set);
  std::copy_n(set.indices, set.count, indices);
  return static_cast<int32_t>(set.count);
}

TopSet TakeTopSet(Arena& arena, int64_t capacity) {
  TopSet set;
  set.capacity = capacity;
  set.keys = arena.Take<int32_t>(TopSet::Room(capacity));
  set.indices = arena.Take<int32_t>(TopSet::Room(capacity));
  return set;
}

SelectScratch TakeSelectScratch(Arena& arena, const IndexSelectParams& p) {
  const int64_t dim = RoundUp(p.dim, kMostLanes), num_heads = RoundUp(p.num_heads, kHeadTile);
  SelectScratch s;
  s.keys = arena.Take<float>(kKeyTile * dim);
  s.row = arena.Take<float>(4 * dim);
  s.q = arena.Take<float>(kMaxTileRows * num_heads * dim);
  s.weights = arena.Take<float>(kMaxTileRows * num_heads);
  s.scores = arena.Take<float>(kKeyTile + kMostLanes);
  for (TopSet& set : s.rows)
    set = TakeTopSet(arena, p.top_k);
  if (p.mode != IndexSelectParams::Mode::kProduce) return s;
  for (TopSet& set : s.blocks)
    set = TakeTopSet(arena, p.candidate_top);
  return s;
}

int32_t WriteAll(int64_t count, int32_t* out) {
  for (int64_t i = 0; i < count; ++i)
    out[i] = static_cast<int32_t>(i);
  return static_cast<int32_t>(count);
}

// What a row needs that scores decide; where everything fits nothing has to be scored.
struct RowNeeds {
  bool selection = false;
  bool candidates = false;
  bool any() const { return selection || candidates; }
};

using Mode = IndexSelectParams::Mode;

int64_t NumBlocks(const IndexSelectParams& p, int64_t num_groups) {
  return (num_groups + p.candidate_block - 1) / p.candidate_block;
}

// State of one row while the keys stream past, block by block.
struct RowStream {
  int64_t visible = 0;
  RowNeeds needs;
  int64_t block = 0;           // the first block that has not ended
  float block_best = kMasked;  // of its scores so far
  int32_t cursor = 0;          // into the ascending candidate list
};

// Masks the scores of groups [begin, begin + count) that lie in no candidate block of row t.
void MaskBlocks(const IndexSelectParams& p,
                int64_t t,
                int64_t begin,
                int64_t count,
                float* scores,
                RowStream& row) {
  const int32_t* candidates = p.candidates.Row<int32_t>(t);
  for (int64_t g = begin; g < begin + count;) {
    const int64_t block = g / p.candidate_block;
    const int64_t stop = std::min(begin + count, (block + 1) * p.candidate_block);
    while (row.cursor < p.num_candidates[t] && candidates[row.cursor] < block)
      ++row.cursor;
    const bool taken = row.cursor < p.num_candidates[t] && candidates[row.cursor] == block;
    if (!taken) std::fill(scores + g - begin, scores + stop - begin, kMasked);
    g = stop;
  }
}

// Offers the best scores of the blocks that end within groups [begin, begin + count).
void FeedBlocks(const IndexSelectParams& p,
                int64_t begin,
                int64_t count,
                const float* scores,
                RowStream& row,
                TopSet& best_blocks) {
  float ended[kKeyTile + kMostLanes];
  const int64_t first = row.block;
  const int64_t newest = (row.visible - 1) / p.candidate_block;  // always among them
  for (int64_t g = begin; g < begin + count;) {
    const int64_t block_end = (row.block + 1) * p.candidate_block;
    const int64_t stop = std::min(begin + count, block_end);
    for (; g < stop; ++g)
      row.block_best = std::max(row.block_best, scores[g - begin]);
    if (stop < block_end && stop < row.visible) continue;
    ended[row.block - first] =
        row.block == newest ? std::numeric_limits<float>::infinity() : row.block_best;
    row.block_best = kMasked;
    ++row.block;
  }
  HWY_DYNAMIC_DISPATCH(AddScores)(best_blocks, ended, first, row.block - first);
}

// Feeds the scores of groups [begin, begin + count) of row t; they may be overwritten.
void FeedScores(const IndexSelectParams& p,
                int64_t t,
                int64_t begin,
                int64_t count,
                float* scores,
                RowStream& row,
                TopSet& best_rows,
                TopSet& best_blocks) {
  if (p.mode == Mode::kConsume) MaskBlocks(p, t, begin, count, scores, row);
  if (p.scores.data != nullptr) std::copy_n(scores, count, p.scores.Row<float>(t) + begin);
  if (row.needs.candidates) FeedBlocks(p, begin, count, scores, row, best_blocks);
  HWY_DYNAMIC_DISPATCH(AddScores)(best_rows, scores, begin, count);
}

// Rows [begin, end) belong to one sequence.
void SelectTile(const IndexSelectParams& p, int64_t begin, int64_t end, SelectScratch& s) {
  RowStream streams[kMaxTileRows];
  const int64_t q_stride = RoundUp(p.num_heads, kHeadTile) * RoundUp(p.dim, kMostLanes);
  int64_t most_visible = 0;
  for (int64_t t = begin; t < end; ++t) {
    RowStream& row = streams[t - begin];
    row.visible = p.rows[t].num_visible;
    row.needs.candidates = p.mode == Mode::kProduce && NumBlocks(p, row.visible) > p.candidate_top;
    const bool all_blocks =
        p.mode != Mode::kConsume || p.num_candidates[t] == NumBlocks(p, row.visible);
    row.needs.selection = row.visible > p.top_k || !all_blocks || p.scores.data != nullptr;
    if (!row.needs.any()) continue;
    most_visible = std::max(most_visible, row.visible);
    s.rows[t - begin].Reset();
    s.blocks[t - begin].Reset();
    HWY_DYNAMIC_DISPATCH(LoadQuery)
    (p, t, s.q + (t - begin) * q_stride, s.weights + (t - begin) * p.num_heads);
  }
  for (int64_t g = 0; g < most_visible; g += kKeyTile) {
    const int64_t stop = std::min(most_visible, g + kKeyTile);
    HWY_DYNAMIC_DISPATCH(DecodeIndexKeys)(p, p.rows[begin].pages, g, stop, s);
    for (int64_t t = begin; t < end; ++t) {
      RowStream& row = streams[t - begin];
      const int64_t count = std::min(row.visible, stop) - g;
      if (!row.needs.any() || count <= 0) continue;
      HWY_DYNAMIC_DISPATCH(ScoreKeys)
      (p, s.q + (t - begin) * q_stride, s.weights + (t - begin) * p.num_heads, s.keys, count,
       s.scores);
      FeedScores(p, t, g, count, s.scores, row, s.rows[t - begin], s.blocks[t - begin]);
    }
  }
  for (int64_t t = begin; t < end; ++t) {
    RowStream& row = streams[t - begin];
    int32_t* selected = p.selected.Row<int32_t>(t);
    p.num_selected[t] =
        row.needs.any() ? Finish(s.rows[t - begin], selected) : WriteAll(row.visible, selected);
    if (p.scores.data != nullptr) {
      float* scores = p.scores.Row<float>(t);
      std::fill(scores + row.visible, scores + p.scores.cols, kMasked);
    }
    if (p.mode != Mode::kProduce) continue;
    int32_t* candidates = p.candidates.Row<int32_t>(t);
    if (row.needs.candidates) {
      p.num_candidates[t] = Finish(s.blocks[t - begin], candidates);
    } else {
      p.num_candidates[t] = WriteAll(NumBlocks(p, row.visible), candidates);
    }
  }
}

// Groups that all rows together have to score, roughly.
int64_t ScoredGroups(const IndexSelectParams& p) {
  int64_t groups = 0;
  for (int64_t t = 0; t < p.q.rows; ++t) {
    if (p.rows[t].num_visible > p.top_k) groups += p.rows[t].num_visible;
  }
  return groups;
}

void CheckSelect(const IndexSelectParams& p) {
  CHECK_EQ(p.q.cols, int64_t{p.num_heads} * p.dim);
  CHECK_EQ(p.weights.cols, int64_t{p.num_heads});
  CHECK_EQ(p.weights.rows, p.q.rows);
  CHECK_EQ(p.keys.cols, p.dim);
  CHECK(p.top_k > 0 && p.rows_per_page > 0) << p.top_k << " " << p.rows_per_page;
  CHECK_GE(p.selected.cols, int64_t{p.top_k});
  CHECK(p.selected.dtype == DType::kI32) << DTypeName(p.selected.dtype);
  if (p.mode == Mode::kPlain) return;
  CHECK(p.candidate_block > 0 && p.candidate_top > 0) << p.candidate_block;
  CHECK_GE(p.candidates.cols, int64_t{p.candidate_top});
}

}  // namespace

void IndexSelectCpu(const IndexSelectParams& params, const Launch& launch) {
  CheckSelect(params);
  const Arena::Scope scope(*launch.arena);
  SelectScratch* scratch = launch.arena->Take<SelectScratch>(NumThreads(launch));
  for (int i = 0; i < NumThreads(launch); ++i)
    scratch[i] = TakeSelectScratch(*launch.arena, params);
  const double row_ns = 100 + 0.03 * static_cast<double>(ScoredGroups(params) * params.q.cols) /
                                  static_cast<double>(std::max<int64_t>(params.q.rows, 1));
  ParallelRows(launch, params.q.rows, RowGrain(row_ns),
               [&](int64_t from, int64_t to, int thread_idx) {
                 for (int64_t begin = from, end; begin < to; begin = end) {
                   end = begin + 1;
                   while (end < to && end - begin < kMaxTileRows &&
                          params.rows[end].pages == params.rows[begin].pages) {
                     ++end;
                   }
                   SelectTile(params, begin, end, scratch[thread_idx]);
                 }
               });
}

int64_t IndexSelectScratchBytesCpu(
    int top_k, int candidate_top, int num_heads, int dim, int num_threads) {
  constexpr int64_t kF32Bytes = static_cast<int64_t>(sizeof(float));
  const int64_t cols = RoundUp(dim, kMostLanes), heads = RoundUp(num_heads, kHeadTile);
  const int64_t floats =
      (kKeyTile + 4) * cols + kMaxTileRows * heads * (cols + 1) + kKeyTile + kMostLanes;
  const int64_t entries = kMaxTileRows * (TopSet::Room(top_k) + TopSet::Room(candidate_top));
  constexpr int64_t kEntryBytes = 2 * static_cast<int64_t>(sizeof(int32_t));
  constexpr int64_t kAlignSlack = (8 + 4 * kMaxTileRows) * static_cast<int64_t>(Arena::kAlign);
  return num_threads * (floats * kF32Bytes + entries * kEntryBytes +
                        static_cast<int64_t>(sizeof(SelectScratch)) + kAlignSlack);
}

}  // namespace twinspark
#endif  // HWY_ONCE
