// Experts of one layer on the CPU: rows gathered per expert, all gate and up linears in one batch,
// then all down linears, then the weighted sum row by row in ascending expert id. The linears give
// a row the same bits whatever rows share their call, so grouping is free.
#include "kernels/moe/moe.h"

#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/moe/moe_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/moe/swiglu.h"
#include "kernels/parallel_rows.h"
#include "kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

// out = sum_k weights[k] * rows[k], k ascending, the first product rounded, then FMAs.
void WeightedRows(
    const float* const* rows, const float* weights, int64_t num_terms, int64_t n, float* out) {
  const DF d;
  ForVectors(d, n, [&](const auto& load, const auto& store) HWY_ATTR {
    VF sum = hn::Zero(d);
    for (int64_t k = 0; k < num_terms; ++k) {
      sum = hn::MulAdd(hn::Set(d, weights[k]), load(rows[k]), sum);
    }
    store(sum, out);
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
namespace {

HWY_EXPORT(WeightedRows);

constexpr int kMaxChosen = 64;

// Where the rows of each expert lie among the gathered rows: expert e has
// [first_row[e], first_row[e + 1]); the shared expert is the last one.
struct ExpertRows {
  int64_t num_groups = 0;        // routed experts and the shared one
  int64_t num_gathered = 0;      // num_rows * (num_chosen + shared)
  int64_t* first_row = nullptr;  // [num_groups + 1]
  int64_t* next_row = nullptr;   // [num_groups], while filling
  int64_t* source = nullptr;     // [num_gathered]: row of x
  int64_t* position = nullptr;   // [num_rows, num_chosen]: gathered row of each choice
};

ExpertRows GroupRows(const MoeParams& p, Arena& arena) {
  ExpertRows rows;
  const int64_t num_rows = p.x.rows, num_chosen = p.ids.cols;
  rows.num_groups = p.num_experts + (p.shared != nullptr ? 1 : 0);
  rows.num_gathered = num_rows * (num_chosen + (p.shared != nullptr ? 1 : 0));
  rows.first_row = arena.Take<int64_t>(rows.num_groups + 1);
  rows.next_row = arena.Take<int64_t>(rows.num_groups);
  rows.source = arena.Take<int64_t>(rows.num_gathered);
  rows.position = arena.Take<int64_t>(num_rows * num_chosen);
  std::fill(rows.next_row, rows.next_row + rows.num_groups, int64_t{0});
  for (int64_t t = 0; t < num_rows; ++t) {
    for (int64_t k = 0; k < num_chosen; ++k) {
      const int32_t id = p.ids.Row<int32_t>(t)[k];
      CHECK(id >= 0 && id < p.num_experts) << "expert " << id << " of " << p.num_experts;
      ++rows.next_row[id];
    }
  }
  if (p.shared != nullptr) rows.next_row[p.num_experts] = num_rows;
  int64_t first = 0;
  for (int64_t e = 0; e < rows.num_groups; ++e) {
    rows.first_row[e] = first;
    first += rows.next_row[e];
    rows.next_row[e] = rows.first_row[e];
  }
  rows.first_row[rows.num_groups] = first;
  for (int64_t t = 0; t < num_rows; ++t) {
    for (int64_t k = 0; k < num_chosen; ++k) {
      const int64_t at = rows.next_row[p.ids.Row<int32_t>(t)[k]]++;
      rows.source[at] = t;
      rows.position[t * num_chosen + k] = at;
    }
    if (p.shared != nullptr) rows.source[rows.first_row[p.num_experts] + t] = t;
  }
  return rows;
}

TensorView TakeView(Arena& arena, DType dtype, int64_t rows, int64_t cols) {
  void* data = arena.TakeBytes(static_cast<size_t>(rows * cols) * DTypeBytes(dtype));
  return TensorView{data, dtype, rows, cols, cols};
}

const ExpertWeights& WeightsOf(const MoeParams& p, int64_t group) {
  return group < p.num_experts ? p.experts[group] : *p.shared;
}

// The gathered rows of one group; the shared expert reads x itself.
ConstTensorView InputOf(const MoeParams& p,
                        const ExpertRows& rows,
                        const TensorView& gathered,
                        int64_t group) {
  if (group == p.num_experts) return p.x;
  const int64_t first = rows.first_row[group];
  return gathered.Rows(first, rows.first_row[group + 1] - first);
}

void GatherRows(const MoeParams& p,
                const ExpertRows& rows,
                const TensorView& gathered,
                const Launch& launch) {
  const size_t row_bytes = static_cast<size_t>(p.x.cols) * DTypeBytes(p.x.dtype);
  const auto copy = [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t grain = RowGrain(0.1 * static_cast<double>(p.x.cols));
    ParallelRows(launch, gathered.rows, grain, [&](int64_t begin, int64_t end, int) {
      for (int64_t i = begin; i < end; ++i) {
        std::memcpy(gathered.Row<T>(i), p.x.Row<T>(rows.source[i]), row_bytes);
      }
    });
  };
  WithFloatType(p.x.dtype, copy);
}

// Weighted sums of partial `part`, row by row.
void SumExperts(const MoeParams& p,
                const ExpertRows& rows,
                const TensorView& outputs,
                int part,
                const Launch& launch) {
  const int64_t num_chosen = p.ids.cols;
  const int64_t grain = RowGrain(0.1 * static_cast<double>((num_chosen + 1) * p.out[part].cols));
  ParallelRows(launch, p.x.rows, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      int64_t order[kMaxChosen];
      const int32_t* ids = p.ids.Row<int32_t>(t);
      for (int64_t k = 0; k < num_chosen; ++k)
        order[k] = k;
      std::sort(order, order + num_chosen, [&](int64_t a, int64_t b) { return ids[a] < ids[b]; });
      const float* terms[kMaxChosen + 1];
      float weights[kMaxChosen + 1];
      for (int64_t k = 0; k < num_chosen; ++k) {
        terms[k] = outputs.Row<float>(rows.position[t * num_chosen + order[k]]);
        weights[k] = p.weights.Row<float>(t)[order[k]];
      }
      int64_t num_terms = num_chosen;
      if (p.shared != nullptr) {
        terms[num_terms] = outputs.Row<float>(rows.first_row[p.num_experts] + t);
        weights[num_terms++] = 1.0f;
      }
      HWY_DYNAMIC_DISPATCH(WeightedRows)
      (terms, weights, num_terms, p.out[part].cols, p.out[part].Row<float>(t));
    }
  });
}

void CheckMoe(const MoeParams& p) {
  CHECK(p.num_partials >= 1 && p.num_partials <= kMaxPartials) << p.num_partials;
  CHECK_EQ(p.inner % p.num_partials, 0);
  CHECK_EQ(p.ids.rows, p.x.rows);
  CHECK_EQ(p.weights.rows, p.x.rows);
  CHECK_EQ(p.weights.cols, p.ids.cols);
  CHECK_LE(p.ids.cols, kMaxChosen);
  for (int part = 0; part < p.num_partials; ++part) {
    CHECK_EQ(p.out[part].rows, p.x.rows);
    CHECK(p.out[part].dtype == DType::kF32) << DTypeName(p.out[part].dtype);
  }
}

}  // namespace

void MoeCpu(const MoeParams& params, const Launch& launch) {
  CheckMoe(params);
  if (params.x.rows == 0) return;
  Arena& arena = *launch.arena;
  const Arena::Scope scope(arena);
  const ExpertRows rows = GroupRows(params, arena);
  const int64_t num_routed = rows.first_row[params.num_experts];
  const TensorView gathered = TakeView(arena, params.x.dtype, num_routed, params.x.cols);
  const TensorView gate = TakeView(arena, params.gate_up_dtype, rows.num_gathered, params.inner);
  const TensorView up = TakeView(arena, params.gate_up_dtype, rows.num_gathered, params.inner);
  const TensorView hidden =
      TakeView(arena, params.activation_dtype, rows.num_gathered, params.inner);
  const TensorView outputs = TakeView(arena, DType::kF32, rows.num_gathered, params.out[0].cols);
  GatherRows(params, rows, gathered, launch);

  LinearParams* jobs = arena.Take<LinearParams>(2 * rows.num_groups);
  size_t num_jobs = 0;
  for (int64_t e = 0; e < rows.num_groups; ++e) {
    const int64_t first = rows.first_row[e], count = rows.first_row[e + 1] - first;
    if (count == 0) continue;
    const ConstTensorView x = InputOf(params, rows, gathered, e);
    const ExpertWeights& weights = WeightsOf(params, e);
    jobs[num_jobs++] = {.weights = weights.gate, .x = x, .y = gate.Rows(first, count)};
    jobs[num_jobs++] = {.weights = weights.up, .x = x, .y = up.Rows(first, count)};
  }
  LinearBatchCpu({.jobs = {jobs, num_jobs}}, launch);
  SwiGluCpu({.gate = gate, .up = up, .limit = params.limit, .out = hidden}, launch);

  const int64_t part_cols = params.inner / params.num_partials;
  for (int part = 0; part < params.num_partials; ++part) {
    num_jobs = 0;
    for (int64_t e = 0; e < rows.num_groups; ++e) {
      const int64_t first = rows.first_row[e], count = rows.first_row[e + 1] - first;
      if (count == 0) continue;
      jobs[num_jobs++] = {.weights = WeightsOf(params, e).down[part],
                          .x = hidden.Rows(first, count).Cols(part * part_cols, part_cols),
                          .y = outputs.Rows(first, count)};
    }
    LinearBatchCpu({.jobs = {jobs, num_jobs}}, launch);
    SumExperts(params, rows, outputs, part, launch);
  }
}

int64_t MoeScratchBytesCpu(
    int64_t num_rows, int num_chosen, int64_t d, int64_t inner, int num_experts) {
  constexpr int64_t kF32Bytes = static_cast<int64_t>(sizeof(float));
  const int64_t gathered = num_rows * (num_chosen + 1);
  const int64_t indices = 2 * (num_experts + 2) + 2 * gathered;
  constexpr int64_t kAlignSlack = 16 * static_cast<int64_t>(Arena::kAlign);
  return gathered * (2 * d + 3 * inner) * kF32Bytes +
         indices * static_cast<int64_t>(sizeof(int64_t)) +
         2 * (num_experts + 1) * static_cast<int64_t>(sizeof(LinearParams)) + kAlignSlack;
}

}  // namespace twinspark
#endif  // HWY_ONCE
