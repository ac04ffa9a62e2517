// Index scores and selection on the CPU. Tiles of rows of one sequence share decoded keys, one page
// at a time; scores stream into a bounded set of the best so far (TopSet), so memory does not grow
// with the context. Cost per row: 2 * num_heads * dim * num_visible flops.
#include "kernels/indexer/index_select.h"

#include <algorithm>
#include <bit>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/indexer/index_select_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/parallel_rows.h"
#include "kernels/quant/codec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

// keys[i] = decoded key of group begin + i.
void DecodeIndexKeys(
    const IndexSelectParams& p, const int32_t* pages, int64_t begin, int64_t end, float* keys) {
  const int64_t row_bytes = p.keys.row_bytes();
  for (int64_t g = begin; g < end; ++g) {
    const int64_t row = int64_t{pages[g / p.rows_per_page]} * p.rows_per_page + g % p.rows_per_page;
    CHECK(row >= 0 && row < p.keys.num_rows) << row << " of " << p.keys.num_rows;
    DecodeRow(p.keys.format, static_cast<const uint8_t*>(p.keys.data) + row * row_bytes, p.dim,
              keys + (g - begin) * p.dim);
  }
}

// The row's queries and scaled weights as f32.
void LoadQuery(const IndexSelectParams& p, int64_t t, float* q, float* weights) {
  const DF d;
  WithFloatType(p.q.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    ForVectors(d, p.q.cols, [&](const auto& load, const auto& store) HWY_ATTR {
      store(load(p.q.Row<T>(t)), q);
    });
  });
  WithFloatType(p.weights.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int h = 0; h < p.num_heads; ++h) {
      weights[h] = ToF32(p.weights.Row<T>(t)[h]) * p.weight_scale;
    }
  });
}

// scores[i] of keys[0 .. count): heads in ascending order, one FMA each. dots: [num_heads, count].
void ScoreKeys(const IndexSelectParams& p,
               const float* q,
               const float* weights,
               const float* keys,
               int64_t count,
               float* dots,
               float* scores) {
  const DF d;
  DotBlock([&](int64_t h) { return q + h * p.dim; }, p.num_heads,
           [&](int64_t k) { return keys + k * p.dim; }, count, p.dim, dots, count);
  std::fill(scores, scores + count, 0.0f);
  for (int h = 0; h < p.num_heads; ++h) {
    const VF weight = hn::Set(d, weights[h]);
    const float* head_dots = dots + h * count;
    ForVectors(d, count, [&](const auto& load, const auto& store) HWY_ATTR {
      const VF relu = hn::Max(load(head_dots), hn::Zero(d));
      store(hn::MulAdd(weight, relu, load(scores)), scores);
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

HWY_EXPORT(DecodeIndexKeys);
HWY_EXPORT(LoadQuery);
HWY_EXPORT(ScoreKeys);

constexpr int64_t kKeyTile = 64;  // groups scored at a time
constexpr int64_t kMaxTileRows = 16;
constexpr float kMasked = -std::numeric_limits<float>::infinity();

// A score and its index as one number: smaller is better, which is the higher score, among equals
// the lower index (-0 and 0 are equal).
uint64_t ScoreKey(float score, int32_t index) {
  const uint32_t bits = std::bit_cast<uint32_t>(score + 0.0f);
  const uint32_t descending = (bits >> 31) != 0 ? bits : ~bits & 0x7fffffffu;
  return static_cast<uint64_t>(descending) << 32 | static_cast<uint32_t>(index);
}
float ScoreOf(uint64_t key) {
  const uint32_t descending = static_cast<uint32_t>(key >> 32);
  return std::bit_cast<float>((descending >> 31) != 0 ? descending : ~descending & 0x7fffffffu);
}

// Keeps the best `capacity` of a stream of scores. Entries that cannot be among them any more are
// skipped by one comparison; the rest are pruned whenever twice the capacity has gathered.
class TopSet {
 public:
  TopSet() = default;
  TopSet(uint64_t* entries, int64_t capacity) : entries_(entries), capacity_(capacity) {}

  void Reset() {
    count_ = 0;
    floor_ = kMasked;
  }
  // Indices must come in ascending order (so an equal score later never displaces an earlier one).
  void Add(float score, int32_t index) {
    if (!(score > floor_)) return;
    entries_[count_++] = ScoreKey(score, index);
    if (count_ == 2 * capacity_) Prune();
  }
  // The best, as ascending indices; returns how many.
  int32_t Finish(int32_t* indices) {
    Prune();
    for (int64_t i = 0; i < count_; ++i)
      indices[i] = static_cast<int32_t>(entries_[i] & 0xffffffffu);
    std::sort(indices, indices + count_);
    return static_cast<int32_t>(count_);
  }

 private:
  void Prune() {
    if (count_ <= capacity_) return;
    std::nth_element(entries_, entries_ + capacity_ - 1, entries_ + count_);
    count_ = capacity_;
    floor_ = ScoreOf(entries_[capacity_ - 1]);
  }

  uint64_t* entries_ = nullptr;  // [2 * capacity]
  int64_t capacity_ = 0;
  int64_t count_ = 0;
  float floor_ = kMasked;
};

// Everything one thread needs for a tile of rows.
struct SelectScratch {
  float* keys = nullptr;     // [kKeyTile, dim]
  float* q = nullptr;        // [kMaxTileRows, num_heads * dim]
  float* weights = nullptr;  // [kMaxTileRows, num_heads]
  float* dots = nullptr;     // [num_heads, kKeyTile]
  float* scores = nullptr;   // [kKeyTile]
  TopSet rows[kMaxTileRows];
  TopSet blocks[kMaxTileRows];
};

SelectScratch TakeSelectScratch(Arena& arena, const IndexSelectParams& p) {
  SelectScratch s;
  s.keys = arena.Take<float>(kKeyTile * p.dim);
  s.q = arena.Take<float>(kMaxTileRows * p.num_heads * p.dim);
  s.weights = arena.Take<float>(kMaxTileRows * p.num_heads);
  s.dots = arena.Take<float>(p.num_heads * kKeyTile);
  s.scores = arena.Take<float>(kKeyTile);
  for (TopSet& set : s.rows)
    set = TopSet(arena.Take<uint64_t>(2 * int64_t{p.top_k}), p.top_k);
  if (p.mode != IndexSelectParams::Mode::kProduce) return s;
  for (TopSet& set : s.blocks) {
    set = TopSet(arena.Take<uint64_t>(2 * int64_t{p.candidate_top}), p.candidate_top);
  }
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
  int64_t block = -1;     // block of the groups being fed
  int64_t block_end = 0;  // its end, in groups
  bool taken = true;      // whether its groups take part
  float block_best = kMasked;
  int32_t cursor = 0;  // into the ascending candidate list
};

void EndBlock(const IndexSelectParams& p, RowStream& row, TopSet& blocks) {
  if (row.block < 0 || !row.needs.candidates) return;
  // The newest visible group's block is pinned.
  const bool pinned = row.block == (row.visible - 1) / p.candidate_block;
  const float best = pinned ? std::numeric_limits<float>::infinity() : row.block_best;
  blocks.Add(best, static_cast<int32_t>(row.block));
}

void NextBlock(const IndexSelectParams& p, int64_t t, RowStream& row, TopSet& blocks) {
  if (p.mode == Mode::kPlain) {
    row.block_end = row.visible;
    return;
  }
  EndBlock(p, row, blocks);
  ++row.block;
  row.block_end += p.candidate_block;
  row.block_best = kMasked;
  if (p.mode != Mode::kConsume) return;
  const int32_t* candidates = p.candidates.Row<int32_t>(t);
  while (row.cursor < p.num_candidates[t] && candidates[row.cursor] < row.block)
    ++row.cursor;
  row.taken = row.cursor < p.num_candidates[t] && candidates[row.cursor] == row.block;
}

// Feeds the scores of groups [begin, begin + count) of row t.
void FeedScores(const IndexSelectParams& p,
                int64_t t,
                int64_t begin,
                int64_t count,
                const float* scores,
                RowStream& row,
                TopSet& best_rows,
                TopSet& best_blocks) {
  float* out = p.scores.data != nullptr ? p.scores.Row<float>(t) : nullptr;
  for (int64_t g = begin; g < begin + count;) {
    if (g == row.block_end) NextBlock(p, t, row, best_blocks);
    const int64_t stop = std::min(begin + count, row.block_end);
    if (out != nullptr) {
      for (int64_t i = g; i < stop; ++i)
        out[i] = row.taken ? scores[i - begin] : kMasked;
    }
    if (row.taken) {
      for (int64_t i = g; i < stop; ++i) {
        row.block_best = std::max(row.block_best, scores[i - begin]);
        best_rows.Add(scores[i - begin], static_cast<int32_t>(i));
      }
    }
    g = stop;
  }
}

// Rows [begin, end) belong to one sequence.
void SelectTile(const IndexSelectParams& p, int64_t begin, int64_t end, SelectScratch& s) {
  RowStream streams[kMaxTileRows];
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
    const int64_t q_cols = int64_t{p.num_heads} * p.dim;
    HWY_DYNAMIC_DISPATCH(LoadQuery)
    (p, t, s.q + (t - begin) * q_cols, s.weights + (t - begin) * p.num_heads);
  }
  for (int64_t g = 0; g < most_visible; g += kKeyTile) {
    const int64_t stop = std::min(most_visible, g + kKeyTile);
    HWY_DYNAMIC_DISPATCH(DecodeIndexKeys)(p, p.rows[begin].pages, g, stop, s.keys);
    for (int64_t t = begin; t < end; ++t) {
      RowStream& row = streams[t - begin];
      const int64_t count = std::min(row.visible, stop) - g;
      if (!row.needs.any() || count <= 0) continue;
      HWY_DYNAMIC_DISPATCH(ScoreKeys)
      (p, s.q + (t - begin) * p.num_heads * p.dim, s.weights + (t - begin) * p.num_heads, s.keys,
       count, s.dots, s.scores);
      FeedScores(p, t, g, count, s.scores, row, s.rows[t - begin], s.blocks[t - begin]);
    }
  }
  for (int64_t t = begin; t < end; ++t) {
    RowStream& row = streams[t - begin];
    int32_t* selected = p.selected.Row<int32_t>(t);
    p.num_selected[t] =
        row.needs.any() ? s.rows[t - begin].Finish(selected) : WriteAll(row.visible, selected);
    if (p.scores.data != nullptr) {
      float* scores = p.scores.Row<float>(t);
      std::fill(scores + row.visible, scores + p.scores.cols, kMasked);
    }
    if (p.mode != Mode::kProduce) continue;
    int32_t* candidates = p.candidates.Row<int32_t>(t);
    if (row.needs.candidates) {
      EndBlock(p, row, s.blocks[t - begin]);
      p.num_candidates[t] = s.blocks[t - begin].Finish(candidates);
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
  const int64_t floats =
      kKeyTile * dim + kMaxTileRows * num_heads * (int64_t{dim} + 1) + (num_heads + 1) * kKeyTile;
  const int64_t entries = 2 * kMaxTileRows * (int64_t{top_k} + candidate_top);
  constexpr int64_t kAlignSlack = (8 + 2 * kMaxTileRows) * static_cast<int64_t>(Arena::kAlign);
  return num_threads * (floats * kF32Bytes + entries * static_cast<int64_t>(sizeof(uint64_t)) +
                        static_cast<int64_t>(sizeof(SelectScratch)) + kAlignSlack);
}

}  // namespace twinspark
#endif  // HWY_ONCE
