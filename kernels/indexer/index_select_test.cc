// Selection against a naive full sort over scores in double, where scores are made of exact numbers
// so that double and f32 agree and ties are real: tie rule, pinned newest block, masks, lists
// shorter than top_k, streaming over many pages. Rows must not depend on company or threads.
#include "kernels/indexer/index_select.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/quant/quantize_rows.h"
#include "kernels/testing/op_fixture.h"

namespace twinspark {
namespace {

using Mode = IndexSelectParams::Mode;

struct Sizes {
  int num_heads = 3;
  int dim = 32;
  int top_k = 9;
  int candidate_block = 4;
  int candidate_top = 5;
  int rows_per_page = 8;
};

// Two sequences with their own pages; small integers as queries, keys and weights: every score is
// exact in f32, and many are equal.
class Scene {
 public:
  Scene(const Sizes& sizes,
        uint64_t seed,
        std::vector<int64_t> visible_a,
        std::vector<int64_t> visible_b)
      : sizes_(sizes),
        q_(static_cast<int64_t>(visible_a.size() + visible_b.size()),
           int64_t{sizes.num_heads} * sizes.dim,
           DType::kBf16),
        weights_(q_.rows(), sizes.num_heads, DType::kF32) {
    RandomTensor random(seed);
    for (int64_t t = 0; t < q_.rows(); ++t) {
      for (int64_t c = 0; c < q_.cols(); ++c)
        q_.set(t, c, static_cast<float>(random.Below(3) - 1));
      for (int h = 0; h < sizes.num_heads; ++h)
        weights_.set(t, h, static_cast<float>(random.Below(5) - 2));
    }
    const int num_pages = 2 * kPagesEach;
    key_bytes_.assign(static_cast<size_t>(keys().row_bytes() * keys().num_rows), 0);
    OpContext context(1);
    for (int sequence = 0; sequence < 2; ++sequence) {
      for (int page = 0; page < kPagesEach; ++page) {
        pages_[sequence].push_back(sequence == 0 ? num_pages - 1 - 2 * page : 2 * page);
        for (int i = 0; i < sizes.rows_per_page; ++i) {
          Matrix key(1, sizes.dim, DType::kF32);
          for (int64_t c = 0; c < sizes.dim; ++c)
            key.set(0, c, static_cast<float>(random.Below(3) - 1));
          const int64_t row = pages_[sequence].back() * sizes.rows_per_page + i;
          StoreRowsCpu({.x = key.view(), .dst = keys(), .index = &row}, context.launch());
          key_values_[sequence].push_back(key.Values());
        }
      }
    }
    for (const int64_t n : visible_a)
      Add(0, n);
    for (const int64_t n : visible_b)
      Add(1, n);
  }

  int64_t num_rows() const { return q_.rows(); }

  double Score(int64_t t, int64_t g) const {
    const auto& key = key_values_[sequence_[static_cast<size_t>(t)]][static_cast<size_t>(g)];
    double score = 0;
    for (int h = 0; h < sizes_.num_heads; ++h) {
      double dot = 0;
      for (int c = 0; c < sizes_.dim; ++c) {
        dot += static_cast<double>(q_.at(t, int64_t{h} * sizes_.dim + c)) *
               static_cast<double>(key[static_cast<size_t>(c)]);
      }
      score += 0.5 * static_cast<double>(weights_.at(t, h)) * std::max(0.0, dot);
    }
    return score;
  }

  IndexSelectParams Params(Mode mode) {
    IndexSelectParams p;
    p.q = q_.view();
    p.weights = weights_.view();
    p.weight_scale = 0.5f;
    p.rows = rows_.data();
    p.num_heads = sizes_.num_heads;
    p.dim = sizes_.dim;
    p.keys = keys();
    p.rows_per_page = sizes_.rows_per_page;
    p.mode = mode;
    p.top_k = sizes_.top_k;
    p.candidate_block = sizes_.candidate_block;
    p.candidate_top = sizes_.candidate_top;
    return p;
  }
  int64_t visible(int64_t t) const { return rows_[static_cast<size_t>(t)].num_visible; }

  static constexpr int kPagesEach = 40;

 private:
  void Add(int sequence, int64_t visible) {
    rows_.push_back({pages_[sequence].data(), visible});
    sequence_.push_back(sequence);
  }
  CacheRows keys() {
    return {key_bytes_.data(), CacheFormat::kQ4E8, 2 * kPagesEach * int64_t{sizes_.rows_per_page},
            sizes_.dim};
  }

  Sizes sizes_;
  Matrix q_, weights_;
  std::vector<uint8_t> key_bytes_;
  std::vector<int32_t> pages_[2];
  std::vector<std::vector<float>> key_values_[2];
  std::vector<IndexRow> rows_;
  std::vector<int> sequence_;
};

// Lists of every row.
struct Lists {
  Lists(int64_t rows, int64_t top_k, int64_t candidate_top)
      : width(top_k),
        candidate_width(candidate_top),
        selected(static_cast<size_t>(rows * top_k), -7),
        num_selected(static_cast<size_t>(rows), -1),
        candidates(static_cast<size_t>(rows * candidate_top), -7),
        num_candidates(static_cast<size_t>(rows), -1) {}
  void Attach(IndexSelectParams& p) {
    const int64_t rows = p.q.rows;
    p.selected = MakeView(selected.data(), rows, width);
    p.num_selected = num_selected.data();
    p.candidates = MakeView(candidates.data(), rows, candidate_width);
    p.num_candidates = num_candidates.data();
  }
  std::vector<int32_t> Selected(int64_t t) const { return List(selected, width, num_selected, t); }
  std::vector<int32_t> Candidates(int64_t t) const {
    return List(candidates, candidate_width, num_candidates, t);
  }
  bool operator==(const Lists&) const = default;

  int64_t width, candidate_width;
  std::vector<int32_t> selected, num_selected, candidates, num_candidates;

 private:
  static std::vector<int32_t> List(const std::vector<int32_t>& all,
                                   int64_t width,
                                   const std::vector<int32_t>& counts,
                                   int64_t t) {
    const auto first = all.begin() + t * width;
    return {first, first + counts[static_cast<size_t>(t)]};
  }
};

// The `count` best of (score, index), lower index first among equals, as ascending indices.
std::vector<int32_t> Best(std::vector<std::pair<double, int32_t>> scored, size_t count) {
  std::erase_if(scored, [](const auto& s) { return s.first == -HUGE_VAL; });
  std::sort(scored.begin(), scored.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first > b.first : a.second < b.second;
  });
  scored.resize(std::min(count, scored.size()));
  std::vector<int32_t> ids;
  for (const auto& s : scored)
    ids.push_back(s.second);
  std::sort(ids.begin(), ids.end());
  return ids;
}

std::vector<int32_t> NaiveCandidates(const Scene& scene, const Sizes& sizes, int64_t t) {
  const int64_t n = scene.visible(t);
  std::vector<std::pair<double, int32_t>> blocks;
  for (int64_t b = 0; b * sizes.candidate_block < n; ++b) {
    double best = -HUGE_VAL;
    for (int64_t g = b * sizes.candidate_block; g < std::min(n, (b + 1) * sizes.candidate_block);
         ++g) {
      best = std::max(best, scene.Score(t, g));
    }
    if (b == (n - 1) / sizes.candidate_block) best = HUGE_VAL;
    blocks.emplace_back(best, static_cast<int32_t>(b));
  }
  return Best(blocks, static_cast<size_t>(sizes.candidate_top));
}

std::vector<int32_t> NaiveSelected(const Scene& scene,
                                   const Sizes& sizes,
                                   int64_t t,
                                   const std::vector<int32_t>* candidates) {
  std::vector<std::pair<double, int32_t>> scored;
  for (int64_t g = 0; g < scene.visible(t); ++g) {
    const int32_t block = static_cast<int32_t>(g / sizes.candidate_block);
    if (candidates != nullptr && !std::binary_search(candidates->begin(), candidates->end(), block))
      continue;
    scored.emplace_back(scene.Score(t, g), static_cast<int32_t>(g));
  }
  return Best(scored, static_cast<size_t>(sizes.top_k));
}

const std::vector<int64_t> kVisibleA = {0, 1, 2, 5, 9, 10, 19, 20, 21, 22, 63, 64, 65, 130, 319};
const std::vector<int64_t> kVisibleB = {3, 40, 200, 201, 202, 203, 204, 205, 206, 207, 208, 300};

TEST(IndexSelect, EveryModeAgreesWithAFullSort) {
  OnEverySimdTarget([&] {
    for (const Sizes& sizes :
         {Sizes{},
          Sizes{.num_heads = 8, .dim = 64, .top_k = 30, .candidate_block = 8, .candidate_top = 2},
          Sizes{.num_heads = 1, .top_k = 1, .candidate_block = 3, .candidate_top = 100}}) {
      Scene scene(sizes, 71, kVisibleA, kVisibleB);
      for (const int threads : {1, 2, 3}) {
        OpContext context(threads);
        Lists plain(scene.num_rows(), sizes.top_k, sizes.candidate_top);
        Lists produced = plain, consumed = plain;
        IndexSelectParams p = scene.Params(Mode::kPlain);
        plain.Attach(p);
        IndexSelectCpu(p, context.launch());
        p = scene.Params(Mode::kProduce);
        produced.Attach(p);
        IndexSelectCpu(p, context.launch());
        p = scene.Params(Mode::kConsume);
        consumed.candidates = produced.candidates;
        consumed.num_candidates = produced.num_candidates;
        consumed.Attach(p);
        IndexSelectCpu(p, context.launch());
        for (int64_t t = 0; t < scene.num_rows(); ++t) {
          const std::vector<int32_t> candidates = NaiveCandidates(scene, sizes, t);
          EXPECT_EQ(plain.Selected(t), NaiveSelected(scene, sizes, t, nullptr)) << t;
          EXPECT_EQ(produced.Selected(t), plain.Selected(t)) << t;
          EXPECT_EQ(produced.Candidates(t), candidates) << t;
          EXPECT_EQ(consumed.Selected(t), NaiveSelected(scene, sizes, t, &candidates)) << t;
        }
        EXPECT_LE(static_cast<int64_t>(context.arena().peak_bytes()),
                  IndexSelectScratchBytesCpu(sizes.top_k, sizes.candidate_top, sizes.num_heads,
                                             sizes.dim, threads));
      }
    }
  });
}

TEST(IndexSelect, ScoresOnRequestAndMaskedOnesAreMinusInfinity) {
  const Sizes sizes;
  Scene scene(sizes, 72, {7, 40}, {100});
  OpContext context(2);
  Lists lists(3, sizes.top_k, sizes.candidate_top);
  IndexSelectParams p = scene.Params(Mode::kProduce);
  lists.Attach(p);
  IndexSelectCpu(p, context.launch());
  p = scene.Params(Mode::kConsume);
  lists.Attach(p);
  Matrix scores(3, 101, DType::kF32);
  p.scores = scores.view();
  IndexSelectCpu(p, context.launch());
  for (int64_t t = 0; t < 3; ++t) {
    const std::vector<int32_t> candidates = lists.Candidates(t);
    for (int64_t g = 0; g < 101; ++g) {
      const bool seen = g < scene.visible(t) &&
                        std::binary_search(candidates.begin(), candidates.end(),
                                           static_cast<int32_t>(g / sizes.candidate_block));
      EXPECT_EQ(static_cast<double>(scores.at(t, g)), seen ? scene.Score(t, g) : -HUGE_VAL);
    }
  }
  EXPECT_TRUE(scores.PaddingIntact());
}

TEST(IndexSelect, RowsDoNotDependOnCompany) {
  const Sizes sizes;
  Scene scene(sizes, 73, kVisibleA, kVisibleB);
  OpContext context(1);
  Lists together(scene.num_rows(), sizes.top_k, sizes.candidate_top);
  Lists alone = together;
  IndexSelectParams p = scene.Params(Mode::kProduce);
  together.Attach(p);
  IndexSelectCpu(p, context.launch());
  for (int64_t t = 0; t < scene.num_rows(); ++t) {
    IndexSelectParams one = scene.Params(Mode::kProduce);
    alone.Attach(one);
    one.q = one.q.Rows(t, 1);
    one.weights = one.weights.Rows(t, 1);
    one.rows += t;
    one.selected = one.selected.Rows(t, 1);
    one.num_selected += t;
    one.candidates = one.candidates.Rows(t, 1);
    one.num_candidates += t;
    IndexSelectCpu(one, context.launch());
  }
  EXPECT_TRUE(alone == together);
}

}  // namespace
}  // namespace twinspark
