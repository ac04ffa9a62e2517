// Attention against a naive double version over scenes with two sequences in one call: ring rows,
// rows of the step, selected rows through shuffled pages, sinks, packed and f32 keys, head sizes
// off the vector width. The same row must have the same bits alone and in company, on 1, 2 and 3
// threads, and whether its keys lie in the ring or among the rows of the step.
#include "kernels/attention/attention.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/quant/quantize_rows.h"
#include "kernels/testing/op_fixture.h"

namespace twinspark {
namespace {

struct SceneSizes {
  int num_heads = 4;
  int head_dim = 64;
  int window = 24;
  int top_k = 12;
  CacheFormat window_format = CacheFormat::kQ8;
  CacheFormat row_format = CacheFormat::kQ4E4;
  DType dtype = DType::kBf16;
};

constexpr int kRowsPerPage = 8;
constexpr int kPages = 20;

// Two sequences whose latents of all positions are known; the step covers rows_a rows of the first
// (positions first_a..) and rows_b of the second.
class Scene {
 public:
  Scene(const SceneSizes& sizes, uint64_t seed, int64_t rows_a, int64_t rows_b, bool keys_in_ring)
      : sizes_(sizes),
        ring_slots_(sizes.window + std::max(rows_a, rows_b) + 3),
        q_(rows_a + rows_b, int64_t{sizes.num_heads} * sizes.head_dim, sizes.dtype),
        context_(1) {
    RandomTensor random(seed);
    q_.Fill(random, 1.5f);
    for (int h = 0; h < sizes.num_heads; ++h)
      sink_.push_back(random.Normal() * 2);
    ring_bytes_.assign(static_cast<size_t>(ring().row_bytes() * ring().num_rows), 0);
    step_bytes_.assign(static_cast<size_t>(step().row_bytes() * step().num_rows), 0);
    page_bytes_.assign(static_cast<size_t>(compressed().row_bytes() * compressed().num_rows), 0);
    selected_ = std::vector<int32_t>(static_cast<size_t>((rows_a + rows_b) * sizes.top_k), -1);
    AddSequence(random, 0, 57, rows_a, keys_in_ring);
    AddSequence(random, 1, 3, rows_b, keys_in_ring);
  }

  int64_t num_rows() const { return q_.rows(); }

  AttentionParams Params(const TensorView& out, bool round) {
    return {.q = q_.view(),
            .rows = rows_.data(),
            .sink = sink_.data(),
            .num_heads = sizes_.num_heads,
            .head_dim = sizes_.head_dim,
            .scale = 1.0f / std::sqrt(static_cast<float>(sizes_.head_dim)),
            .round_probabilities = round,
            .ring = ring(),
            .ring_slots = ring_slots_,
            .step_rows = step(),
            .compressed = compressed(),
            .rows_per_page = kRowsPerPage,
            .selected =
                MakeView(static_cast<const int32_t*>(selected_.data()), num_rows(), sizes_.top_k),
            .num_selected = num_selected_.data(),
            .out = out};
  }
  // Row t alone.
  AttentionParams RowParams(const TensorView& out, bool round, int64_t t) {
    AttentionParams p = Params(out.Rows(t, 1), round);
    p.q = p.q.Rows(t, 1);
    p.rows += t;
    p.selected = p.selected.Rows(t, 1);
    p.num_selected += t;
    return p;
  }

  std::vector<double> Naive(bool round) const {
    std::vector<double> out;
    for (int64_t t = 0; t < num_rows(); ++t) {
      const auto& keys = keys_[static_cast<size_t>(t)];
      for (int h = 0; h < sizes_.num_heads; ++h) {
        std::vector<double> scores;
        double largest = sink_[static_cast<size_t>(h)];
        for (const std::vector<float>& key : keys) {
          double dot = 0;
          for (int c = 0; c < sizes_.head_dim; ++c) {
            dot += static_cast<double>(q_.at(t, int64_t{h} * sizes_.head_dim + c)) *
                   static_cast<double>(key[static_cast<size_t>(c)]);
          }
          scores.push_back(dot / std::sqrt(static_cast<double>(sizes_.head_dim)));
          largest = std::max(largest, scores.back());
        }
        double sum = std::exp(sink_[static_cast<size_t>(h)] - largest);
        std::vector<double> values(static_cast<size_t>(sizes_.head_dim), 0.0);
        for (size_t k = 0; k < keys.size(); ++k) {
          const double e = std::exp(scores[k] - largest);
          sum += e;
          const double weight = round ? static_cast<double>(RoundBf16(static_cast<float>(e))) : e;
          for (size_t c = 0; c < values.size(); ++c) {
            values[c] += weight * static_cast<double>(keys[k][c]);
          }
        }
        for (const double v : values)
          out.push_back(keys.empty() ? 0.0 : v / sum);
      }
    }
    return out;
  }

 private:
  CacheRows ring() {
    return {ring_bytes_.data(), sizes_.window_format, 2 * ring_slots_, sizes_.head_dim};
  }
  CacheRows step() {
    return {step_bytes_.data(), sizes_.window_format, num_rows(), sizes_.head_dim};
  }
  CacheRows compressed() {
    return {page_bytes_.data(), sizes_.row_format, kPages * kRowsPerPage, sizes_.head_dim};
  }

  // Stores one random row; returns its decoded values.
  std::vector<float> Store(RandomTensor& random, const CacheRows& rows, int64_t index) {
    Matrix x(1, sizes_.head_dim, DType::kF32), back(1, sizes_.head_dim, DType::kF32);
    x.Fill(random);
    StoreRowsCpu({.x = x.view(), .dst = rows, .index = &index}, context_.launch());
    LoadRowsCpu({.src = rows, .index = &index, .out = back.view()}, context_.launch());
    return back.Values();
  }
  void CopyTo(const CacheRows& from, int64_t src, const CacheRows& to, int64_t dst) {
    CopyRowsCpu({.src = from, .dst = to, .num_rows = 1, .src_index = &src, .dst_index = &dst},
                context_.launch());
  }

  void AddSequence(
      RandomTensor& random, int64_t slot, int64_t first, int64_t count, bool keys_in_ring) {
    const int64_t row0 = static_cast<int64_t>(rows_.size());
    std::vector<std::vector<float>> latents;
    for (int64_t p = 0; p < first + count; ++p) {
      const int64_t at = slot * ring_slots_ + p % ring_slots_;
      if (p < first) {
        latents.push_back(Store(random, ring(), at));
      } else {
        latents.push_back(Store(random, step(), row0 + p - first));
        if (keys_in_ring) CopyTo(step(), row0 + p - first, ring(), at);
      }
    }
    std::vector<int32_t>& pages = pages_[slot];
    std::vector<std::vector<float>> groups;
    for (int32_t page = 0; page < kPages / 2; ++page) {
      pages.push_back(slot == 0 ? 2 * page + 1 : kPages - 2 - 2 * page);
      for (int i = 0; i < kRowsPerPage; ++i) {
        groups.push_back(Store(random, compressed(), pages.back() * kRowsPerPage + i));
      }
    }
    for (int64_t t = row0; t < row0 + count; ++t) {
      const int64_t p = first + t - row0;
      AttentionRow row;
      row.ring_first_row = slot * ring_slots_;
      const int64_t begin = std::max<int64_t>(0, p - sizes_.window + 1);
      row.ring_begin = keys_in_ring ? begin : std::min(begin, first);
      row.ring_end = keys_in_ring ? p + 1 : first;
      row.step_begin = keys_in_ring ? 0 : row0 + std::max(begin, first) - first;
      row.step_end = keys_in_ring ? 0 : t + 1;
      row.pages = pages.data();
      rows_.push_back(row);
      auto& keys = keys_.emplace_back();
      for (int64_t k = begin; k <= p; ++k)
        keys.push_back(latents[static_cast<size_t>(k)]);
      const int64_t visible = std::min<int64_t>((p + 1) / 2, static_cast<int64_t>(groups.size()));
      std::vector<int32_t> all;
      for (int32_t g = 0; g < visible; ++g)
        all.push_back(g);
      while (static_cast<int64_t>(all.size()) > sizes_.top_k) {
        all.erase(all.begin() + random.Below(static_cast<int64_t>(all.size())));
      }
      std::copy(all.begin(), all.end(), selected_.begin() + t * sizes_.top_k);
      num_selected_.push_back(static_cast<int32_t>(all.size()));
      for (const int32_t g : all)
        keys.push_back(groups[static_cast<size_t>(g)]);
    }
  }

  SceneSizes sizes_;
  int64_t ring_slots_;
  Matrix q_;
  OpContext context_;
  std::vector<float> sink_;
  std::vector<uint8_t> ring_bytes_, step_bytes_, page_bytes_;
  std::vector<int32_t> pages_[2];
  std::vector<AttentionRow> rows_;
  std::vector<int32_t> selected_, num_selected_;
  std::vector<std::vector<std::vector<float>>> keys_;  // per row: decoded keys in order
};

SceneSizes F32Sizes(int num_heads, int head_dim) {
  return {.num_heads = num_heads,
          .head_dim = head_dim,
          .window_format = CacheFormat::kF32,
          .row_format = CacheFormat::kF32,
          .dtype = DType::kF32};
}

TEST(Attention, NearDoubleInF32) {
  OpContext context(2);
  OnEverySimdTarget([&] {
    for (const auto& [heads, dim] :
         {std::pair{1, 16}, {2, 23}, {3, 48}, {4, 512}, {5, 100}, {70, 8}}) {
      Scene scene(F32Sizes(heads, dim), 41, 9, 6, false);
      Matrix out(scene.num_rows(), int64_t{heads} * dim, DType::kF32);
      AttentionCpu(scene.Params(out.view(), false), context.launch());
      EXPECT_TRUE(Near(out, scene.Naive(false), 8e-6, 2e-6)) << heads << " x " << dim;
      EXPECT_TRUE(out.PaddingIntact());
    }
  });
}

TEST(Attention, NearDoubleWithPackedKeysAndRoundedProbabilities) {
  OpContext context(2);
  OnEverySimdTarget([&] {
    for (const auto& [heads, dim] : {std::pair{2, 32}, {4, 128}, {4, 512}}) {
      Scene scene({.num_heads = heads, .head_dim = dim}, 42, 20, 7, false);
      Matrix out(scene.num_rows(), int64_t{heads} * dim, DType::kF32);
      AttentionCpu(scene.Params(out.view(), true), context.launch());
      // A probability next to a rounding boundary may fall to the other side: 2^-9 of a key.
      EXPECT_TRUE(Near(out, scene.Naive(true), 2e-3, 1e-5)) << heads << " x " << dim;
      AttentionCpu(scene.Params(out.view(), false), context.launch());
      EXPECT_TRUE(Near(out, scene.Naive(false), 4e-6, 4e-6)) << heads << " x " << dim;
    }
  });
}

TEST(Attention, RowsDoNotDependOnCompanyThreadsOrWhereTheKeysLie) {
  OnEverySimdTarget([&] {
    for (const bool round : {false, true}) {
      const int dim = round ? 96 : 256;
      const SceneSizes sizes{.num_heads = 4, .head_dim = dim};
      Scene in_step(sizes, 43, 90, 31, false), in_ring(sizes, 43, 90, 31, true);
      const int64_t rows = in_step.num_rows();
      Matrix alone(rows, 4 * dim, DType::kBf16);
      OpContext one(1);
      for (int64_t t = 0; t < rows; ++t) {
        AttentionCpu(in_step.RowParams(alone.view(), round, t), one.launch());
      }
      for (const int threads : {1, 2, 3}) {
        OpContext context(threads);
        Matrix out(rows, 4 * dim, DType::kBf16);
        AttentionCpu(in_step.Params(out.view(), round), context.launch());
        EXPECT_TRUE(SameBits(out, alone)) << threads << " threads";
        AttentionCpu(in_ring.Params(out.view(), round), context.launch());
        EXPECT_TRUE(SameBits(out, alone)) << threads << " threads, keys in the ring";
        for (int64_t t = 0; t < rows; t += 5) {
          const int64_t count = std::min<int64_t>(5, rows - t);
          AttentionParams p = in_ring.Params(out.view().Rows(t, count), round);
          p.q = p.q.Rows(t, count);
          p.rows += t;
          p.selected = p.selected.Rows(t, count);
          p.num_selected += t;
          AttentionCpu(p, context.launch());
        }
        EXPECT_TRUE(SameBits(out, alone)) << threads << " threads, five at a time";
      }
    }
  });
}

TEST(Attention, RowWithoutKeysIsZeroAndSinkAloneTakesTheRest) {
  OpContext context(1);
  std::vector<uint8_t> ring(static_cast<size_t>(CacheRowBytes(CacheFormat::kF32, 16) * 4), 0);
  float* key = reinterpret_cast<float*>(ring.data());
  for (int c = 0; c < 16; ++c)
    key[c] = 2;
  Matrix q(2, 16, DType::kF32), out(2, 16, DType::kF32);
  for (int64_t c = 0; c < 16; ++c) {
    q.set(0, c, 1);
    q.set(1, c, 0);  // score 0 equals the sink: half of the weight each
  }
  const float sink = 0;
  AttentionRow rows[2];
  rows[1].ring_end = 1;
  AttentionCpu({.q = q.view(),
                .rows = rows,
                .sink = &sink,
                .num_heads = 1,
                .head_dim = 16,
                .scale = 0.25f,
                .ring = {ring.data(), CacheFormat::kF32, 4, 16},
                .ring_slots = 4,
                .out = out.view()},
               context.launch());
  for (int64_t c = 0; c < 16; ++c) {
    EXPECT_EQ(out.at(0, c), 0);
    EXPECT_EQ(out.at(1, c), 1);
  }
}

TEST(Attention, ExtremeScoresDoNotOverflow) {
  OpContext context(1);
  std::vector<uint8_t> ring(static_cast<size_t>(CacheRowBytes(CacheFormat::kF32, 16) * 4), 0);
  float* keys = reinterpret_cast<float*>(ring.data());
  for (int c = 0; c < 16; ++c) {
    keys[c] = 1000;
    keys[16 + c] = -1000;
  }
  Matrix q(1, 16, DType::kF32), out(1, 16, DType::kF32);
  for (int64_t c = 0; c < 16; ++c)
    q.set(0, c, 1000);
  AttentionRow row;
  row.ring_end = 2;
  for (const float sink : {-1e30f, 0.0f, 1e8f}) {
    AttentionCpu({.q = q.view(),
                  .rows = &row,
                  .sink = &sink,
                  .num_heads = 1,
                  .head_dim = 16,
                  .scale = 0.25f,
                  .ring = {ring.data(), CacheFormat::kF32, 4, 16},
                  .ring_slots = 4,
                  .out = out.view()},
                 context.launch());
    EXPECT_EQ(out.at(0, 3), sink > 1 ? 0.0f : 1000.0f) << sink;
  }
}

TEST(Attention, StaysWithinItsScratchBound) {
  const SceneSizes sizes{.num_heads = 4, .head_dim = 96};
  Scene scene(sizes, 44, 90, 31, false);
  for (const int threads : {1, 3}) {
    OpContext context(threads);
    Matrix out(scene.num_rows(), 4 * 96, DType::kF32);
    AttentionCpu(scene.Params(out.view(), false), context.launch());
    EXPECT_LE(static_cast<int64_t>(context.arena().peak_bytes()),
              AttentionScratchBytesCpu(sizes.window + sizes.top_k, 4, 96, threads));
  }
}

}  // namespace
}  // namespace twinspark
