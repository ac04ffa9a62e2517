// Attention and experts as the reference rounds them (reference_ops.h; model specification 3.7,
// 3.10 and section 6, column REF).
#include "tests/golden/model/reference_ops.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace twinspark::golden {
namespace {

constexpr int64_t kKeyBlock = 64;  // keys per round of the online softmax

std::vector<float> ReadRow(const ConstTensorView& view, int64_t row) {
  std::vector<float> out(static_cast<size_t>(view.cols));
  for (size_t i = 0; i < out.size(); ++i)
    out[i] = view.dtype == DType::kBf16 ? ToF32(view.Row<Bf16>(row)[i]) : view.Row<float>(row)[i];
  return out;
}

void WriteRow(const TensorView& view,
              int64_t row,
              int64_t first,
              const std::vector<float>& values) {
  for (size_t i = 0; i < values.size(); ++i) {
    if (view.dtype == DType::kBf16) {
      view.Row<Bf16>(row)[first + static_cast<int64_t>(i)] = ToBf16(values[i]);
    } else {
      view.Row<float>(row)[first + static_cast<int64_t>(i)] = values[i];
    }
  }
}

// The keys of one row in list order: window, then selected rows.
std::vector<std::vector<float>> Keys(const AttentionParams& p, int64_t t, const Launch& launch) {
  const AttentionRow& row = p.rows[t];
  std::vector<std::vector<float>> keys;
  const auto load = [&](const CacheRows& from, const std::vector<int64_t>& index) {
    if (index.empty()) return;
    std::vector<float> values(index.size() * static_cast<size_t>(p.head_dim));
    CpuOps().load_rows({.src = from,
                        .index = index.data(),
                        .out = MakeView(values.data(), static_cast<int64_t>(index.size()),
                                        static_cast<int64_t>(p.head_dim))},
                       launch);
    for (size_t i = 0; i < index.size(); ++i)
      keys.emplace_back(values.begin() + static_cast<std::ptrdiff_t>(i) * p.head_dim,
                        values.begin() + static_cast<std::ptrdiff_t>(i + 1) * p.head_dim);
  };
  std::vector<int64_t> index;
  for (int64_t position = row.ring_begin; position < row.ring_end; ++position)
    index.push_back(row.ring_first_row + position % p.ring_slots);
  load(p.ring, index);
  index.clear();
  for (int64_t i = row.step_begin; i < row.step_end; ++i)
    index.push_back(i);
  load(p.step_rows, index);
  index.clear();
  for (int32_t i = 0; p.num_selected != nullptr && i < p.num_selected[t]; ++i) {
    const int64_t group = p.selected.Row<int32_t>(t)[i];
    index.push_back(row.pages[group / p.rows_per_page] * int64_t{p.rows_per_page} +
                    group % p.rows_per_page);
  }
  load(p.compressed, index);
  return keys;
}

// Online softmax over blocks of keys; e is rounded relative to the running maximum, the sink enters
// the denominator at the end.
void ReferenceAttention(const AttentionParams& p, const Launch& launch) {
  for (int64_t t = 0; t < p.q.rows; ++t) {
    const std::vector<std::vector<float>> keys = Keys(p, t, launch);
    const std::vector<float> q = ReadRow(p.q, t);
    for (int h = 0; h < p.num_heads; ++h) {
      const float* head = q.data() + h * p.head_dim;
      std::vector<float> sums(static_cast<size_t>(p.head_dim), 0.0f);
      float largest = -INFINITY;
      float denominator = 0;
      for (size_t first = 0; first < keys.size(); first += kKeyBlock) {
        const size_t end = std::min(keys.size(), first + kKeyBlock);
        std::vector<float> scores;
        float block_largest = largest;
        for (size_t k = first; k < end; ++k) {
          float score = 0;
          for (int i = 0; i < p.head_dim; ++i)
            score += head[i] * keys[k][static_cast<size_t>(i)];
          scores.push_back(score * p.scale);
          block_largest = std::max(block_largest, scores.back());
        }
        const float shrink = std::exp(largest - block_largest);
        for (float& sum : sums)
          sum *= shrink;
        denominator *= shrink;
        largest = block_largest;
        float block_sum = 0;
        for (size_t k = first; k < end; ++k) {
          const float e = std::exp(scores[k - first] - largest);
          block_sum += e;
          const float rounded = p.round_probabilities ? RoundBf16(e) : e;
          for (size_t i = 0; i < sums.size(); ++i)
            sums[i] += rounded * keys[k][i];
        }
        denominator += block_sum;
      }
      if (!keys.empty()) denominator += std::exp(p.sink[h] - largest);
      for (float& sum : sums)
        sum = keys.empty() ? 0.0f : sum / denominator;
      WriteRow(p.out, t, static_cast<int64_t>(h) * p.head_dim, sums);
    }
  }
}

// The routing weight multiplies the activation before w2; outputs of w2 are rounded, summed in f32
// in ascending expert id, the shared expert last.
void ReferenceMoe(const MoeParams& p, const Launch& launch) {
  const DType rounding = p.activation_dtype;
  const auto allocate = [&](std::vector<float>& storage, int64_t cols) {
    storage.assign(static_cast<size_t>(cols), 0.0f);  // bf16 fits into half of it
    return TensorView{storage.data(), rounding, 1, cols, cols};
  };
  std::vector<float> gate_storage, up_storage, active_storage, out_storage;
  for (int64_t t = 0; t < p.x.rows; ++t) {
    std::vector<std::pair<int32_t, float>> chosen;
    for (int64_t k = 0; k < p.ids.cols; ++k)
      chosen.emplace_back(p.ids.Row<int32_t>(t)[k], p.weights.Row<float>(t)[k]);
    std::sort(chosen.begin(), chosen.end());
    for (int part = 0; part < p.num_partials; ++part)
      std::fill_n(p.out[part].Row<float>(t), p.out[part].cols, 0.0f);
    const auto add = [&](const ExpertWeights& expert, float weight) {
      const ConstTensorView x = p.x.Rows(t, 1);
      const TensorView gate = allocate(gate_storage, p.inner);
      const TensorView up = allocate(up_storage, p.inner);
      const TensorView active = allocate(active_storage, p.inner);
      CpuOps().linear({.weights = expert.gate, .x = x, .y = gate}, launch);
      CpuOps().linear({.weights = expert.up, .x = x, .y = up}, launch);
      const std::vector<float> g = ReadRow(gate, 0);
      const std::vector<float> u = ReadRow(up, 0);
      std::vector<float> a(g.size());
      for (size_t i = 0; i < a.size(); ++i) {
        const float clamped = std::min(g[i], p.limit);
        const float silu = clamped / (1.0f + std::exp(-clamped));
        a[i] = weight * (silu * std::clamp(u[i], -p.limit, p.limit));
      }
      WriteRow(active, 0, 0, a);
      const int64_t width = p.inner / p.num_partials;
      for (int part = 0; part < p.num_partials; ++part) {
        // With partial sums the rounding of the output comes after their sum, as on several ranks.
        const bool is_split = p.num_partials > 1;
        std::vector<float> f32_out(static_cast<size_t>(p.out[part].cols));
        const TensorView out = is_split ? MakeView(f32_out.data(), 1, p.out[part].cols)
                                        : allocate(out_storage, p.out[part].cols);
        CpuOps().linear({.weights = expert.down[part],
                         .x = ConstTensorView(active).Cols(part * width, width),
                         .y = out},
                        launch);
        const std::vector<float> o = ReadRow(out, 0);
        for (size_t i = 0; i < o.size(); ++i)
          p.out[part].Row<float>(t)[i] += o[i];
      }
    };
    for (const auto& [id, weight] : chosen)
      add(p.experts[id], weight);
    if (p.shared != nullptr) add(*p.shared, 1.0f);
  }
}

}  // namespace

const OpTable& ReferenceRoundingOps() {
  static const OpTable table = [] {
    OpTable ops = CpuOps();
    ops.attention = ReferenceAttention;
    ops.moe = ReferenceMoe;
    return ops;
  }();
  return table;
}

}  // namespace twinspark::golden
