// Index scores and selection on the CPU. Tiles of rows of one sequence share decoded keys, one tile
// of keys at a time; scores stream into a bounded set of the best so far (TopSet), so memory does
// not grow with the context. Cost per row: 2 * num_heads * dim * num_visible flops.
#include "kernels/indexer/index_select.h"

#include <algorithm>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/indexer/index_select_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/indexer/score_keys-inl.h"
#include "kernels/parallel_rows.h"
#include "kernels/top_set-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

// Offers scores[0 .. count) of the indices from `first` on; count <= kKeyTile. The scores may be
// read, as masked, up to a whole vector.
void AddScores(TopSet& set, float* scores, int64_t first, int64_t count) {
  std::fill(scores + count, scores + RoundUp(count, kLanes), kMasked);
  OfferScores(set, scores, first, count);
}

void PruneSet(TopSet& set) {
  Prune(set);
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
HWY_EXPORT(PruneSet);

// The best, as ascending indices; returns how many.
int32_t Finish(TopSet& set, int32_t* indices) {
  HWY_DYNAMIC_DISPATCH(PruneSet)(set);
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
