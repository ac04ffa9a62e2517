// The linear op on the CPU: EXL3 matrices go to kernels/exl3 in one batch, dense ones are done
// here. A unit of dense work is two strips (32 outputs) of one matrix for all rows of a block of
// rows. Few rows read the weights once, straight into the product; many rows take them in pieces
// that fit the first-level cache (bf16 widened to f32 there). Same chain per output either way.
#include "kernels/gemm/linear.h"

#include <algorithm>
#include <cstring>

#include "common/check.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/gemm/linear_cpu.cc"
#include "hwy/foreach_target.h"
// Highway needs its headers after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/gemm/dense_job.h"
#include "kernels/panel_gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {

// Rows [begin, end) of a bf16 input to f32.
void WidenRows(const DenseJob& job, int64_t begin, int64_t end) {
  const PanelF32 d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t count = job.weights->in();
  for (int64_t row = begin; row < end; ++row) {
    const uint16_t* HWY_RESTRICT from = reinterpret_cast<const uint16_t*>(job.x.Row<Bf16>(row));
    float* HWY_RESTRICT to = job.widened + row * job.xf_stride;
    int64_t i = 0;
    for (; i + lanes <= count; i += lanes)
      hn::StoreU(LoadWeights(from + i), d, to + i);
    for (; i < count; ++i)
      to[i] = ToF32(Bf16{from[i]});
  }
}

// z[rows][32] of a unit, whose first strip is `first`; W is float or uint16_t (bf16 bits).
template <class W>
void MultiplyStripPair(const DenseJob& job,
                       const W* first,
                       float* HWY_RESTRICT panel,
                       float* HWY_RESTRICT z) {
  const size_t in = static_cast<size_t>(job.weights->in());
  const size_t rows = static_cast<size_t>(job.rows());
  const size_t x_stride = static_cast<size_t>(job.xf_stride);
  constexpr size_t kColumns = 2 * kPanelLanes;
  for (size_t c0 = 0; c0 < 32; c0 += kColumns) {
    const size_t c1 = c0 + kPanelLanes;
    const W* w0 = first + (c0 / 16) * in * 16 + c0 % 16;
    const W* w1 = first + (c1 / 16) * in * 16 + c1 % 16;
    if (rows <= kDenseMaxDirectRows) {
      PanelGemm(job.xf, x_stride, rows, w0, w1, 16, in, z + c0, z + c1, 32);
    } else {
      PanelGemmInPieces(job.xf, x_stride, rows, w0, w1, 16, in, kDensePanelSteps, panel, z + c0,
                        z + c1, 32);
    }
  }
}

// One row: z[32 * num_units] of the units whose strips begin at `first`, as far as four vectors at
// a time go; returns the columns done.
template <class W>
size_t MultiplyOneRow(const DenseJob& job, const W* first, int64_t num_units, float* z) {
  const size_t in = static_cast<size_t>(job.weights->in());
  constexpr size_t kN = kPanelLanes;
  const size_t columns = 32 * static_cast<size_t>(num_units);
  size_t c0 = 0;
  for (; c0 + 4 * kN <= columns; c0 += 4 * kN) {
    const auto at = [&](size_t c) { return first + (c / 16) * in * 16 + c % 16; };
    PanelOneRowWide(job.xf, at(c0), at(c0 + kN), at(c0 + 2 * kN), at(c0 + 3 * kN), 16, in, z + c0,
                    z + c0 + kN, z + c0 + 2 * kN, z + c0 + 3 * kN);
  }
  return c0;
}

template <class W>
void MultiplyStrips(const DenseJob& job,
                    const W* first,
                    int64_t num_units,
                    float* HWY_RESTRICT panel,
                    float* HWY_RESTRICT z) {
  if (job.rows() == 1 && MultiplyOneRow(job, first, num_units, z) > 0) return;
  for (int64_t u = 0; u < num_units; ++u)
    MultiplyStripPair(job, first + u * 32 * job.weights->in(), panel, z + u * 32);
}

// Units [unit, unit + num_units) of a job; more than one only of a single row. scratch:
// kDenseThreadFloats, 64-byte aligned.
void MultiplyUnits(const DenseJob& job,
                   int64_t unit,
                   int64_t num_units,
                   float* HWY_RESTRICT scratch) {
  float* HWY_RESTRICT panel = scratch;
  float* HWY_RESTRICT z = scratch + kDensePanelFloats;
  const int64_t width = 32 * num_units;
  std::fill(z, z + job.rows() * width, 0.0f);
  if (job.weights->dtype() == DType::kF32) {
    MultiplyStrips(job, job.weights->F32Strip(2 * unit), num_units, panel, z);
  } else {
    MultiplyStrips(job, job.weights->Bf16Strip(2 * unit), num_units, panel, z);
  }
  const int64_t begin = 32 * unit;
  const size_t count = static_cast<size_t>(std::min(width, job.weights->out() - begin));
  const PanelF32 d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  HWY_ALIGN uint16_t rounded[32 * kDenseMaxUnits];
  for (int64_t row = 0; row < job.rows(); ++row) {
    if (job.y.dtype == DType::kF32) {
      std::memcpy(job.y.Row<float>(row) + begin, z + row * width, count * sizeof(float));
      continue;
    }
    for (int64_t i = 0; i < width; i += lanes)
      StoreBf16(hn::LoadU(d, z + row * width + i), rounded + i);
    std::memcpy(job.y.Row<Bf16>(row) + begin, rounded, count * sizeof(uint16_t));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
namespace {

HWY_EXPORT(WidenRows);
HWY_EXPORT(MultiplyUnits);

constexpr int64_t kRowPadding = 16;  // floats
// Below this many values the calling thread widens alone: a barrier would cost more.
constexpr int64_t kMinParallelWiden = 16384;

void CheckDense(const LinearParams& p) {
  const DenseWeights& w = *p.weights->dense();
  CHECK_EQ(p.x.cols, w.in());
  CHECK_EQ(p.y.cols, w.out());
  CHECK_EQ(p.x.rows, p.y.rows);
  CHECK(p.x.dtype == DType::kF32 || p.x.dtype == DType::kBf16) << DTypeName(p.x.dtype);
  CHECK(p.y.dtype == DType::kF32 || p.y.dtype == DType::kBf16) << DTypeName(p.y.dtype);
}

DenseJob MakeJob(const LinearParams& p, int64_t first, int64_t rows, Arena& arena) {
  DenseJob job;
  job.weights = p.weights->dense();
  job.x = p.x.Rows(first, rows);
  job.y = p.y.Rows(first, rows);
  if (job.x.dtype == DType::kF32) {
    job.xf = job.x.Row<float>(0);
    job.xf_stride = job.x.row_stride;
  } else {
    job.xf_stride = job.weights->in() + kRowPadding;
    job.widened = arena.Take<float>(rows * job.xf_stride);
    job.xf = job.widened;
  }
  return job;
}

void WidenInputs(std::span<const DenseJob> jobs, const Launch& launch) {
  int64_t num_rows = 0;
  int64_t num_values = 0;
  for (const DenseJob& job : jobs) {
    if (job.widened == nullptr) continue;
    num_rows += job.rows();
    num_values += job.rows() * job.weights->in();
  }
  const auto run = [&](int64_t begin, int64_t end) {
    int64_t first = 0;
    for (const DenseJob& job : jobs) {
      if (job.widened == nullptr) continue;
      const int64_t from = std::max(begin, first);
      const int64_t to = std::min(end, first + job.rows());
      if (from < to) HWY_DYNAMIC_DISPATCH(WidenRows)(job, from - first, to - first);
      first += job.rows();
    }
  };
  if (num_values < kMinParallelWiden) {
    run(0, num_rows);
  } else {
    launch.pool->ParallelFor(num_rows, 1,
                             [&](int64_t begin, int64_t end, int) { run(begin, end); });
  }
}

// Units in equal shares of cost, one contiguous range for every thread.
void MultiplyAll(std::span<const DenseJob> jobs, float* scratch, const Launch& launch) {
  int64_t total = 0;
  for (const DenseJob& job : jobs)
    total += job.UnitCost() * job.units();
  const int64_t shares = launch.pool->num_threads();
  launch.pool->ParallelFor(shares, 1, [&](int64_t begin, int64_t end, int thread_idx) {
    const int64_t from = total * begin / shares;
    const int64_t to = total * end / shares;
    float* own = scratch + thread_idx * kDenseThreadFloats;
    int64_t start = 0;  // of the unit, on the axis of cost
    for (const DenseJob& job : jobs) {
      const int64_t cost = job.UnitCost();
      for (int64_t unit = 0; unit < job.units();) {
        const int64_t middle = start + cost / 2;
        if (middle < from || middle >= to) {
          ++unit;
          start += cost;
          continue;
        }
        int64_t count = 1;
        const int64_t most = std::min(job.rows() == 1 ? kDenseMaxUnits : 1, job.units() - unit);
        while (count < most && middle + count * cost < to)
          ++count;
        HWY_DYNAMIC_DISPATCH(MultiplyUnits)(job, unit, count, own);
        unit += count;
        start += count * cost;
      }
    }
  });
}

void DenseBatch(std::span<const LinearParams> params, const Launch& launch) {
  const Arena::Scope scope(*launch.arena);
  int64_t max_rows = 0;
  for (const LinearParams& p : params) {
    if (p.weights->dense() == nullptr) continue;
    CheckDense(p);
    max_rows = std::max(max_rows, p.x.rows);
  }
  if (max_rows == 0) return;
  DenseJob* jobs = launch.arena->Take<DenseJob>(static_cast<int64_t>(params.size()));
  float* scratch = launch.arena->Take<float>(launch.pool->num_threads() * kDenseThreadFloats);
  for (int64_t first = 0; first < max_rows; first += kDenseRowBlock) {
    const Arena::Scope block_scope(*launch.arena);
    size_t active = 0;
    for (const LinearParams& p : params) {
      const int64_t rows = std::min(kDenseRowBlock, p.x.rows - first);
      if (p.weights->dense() == nullptr || rows <= 0) continue;
      jobs[active++] = MakeJob(p, first, rows, *launch.arena);
    }
    const std::span<const DenseJob> now(jobs, active);
    WidenInputs(now, launch);
    MultiplyAll(now, scratch, launch);
  }
}

void Exl3Batch(std::span<const LinearParams> params, const Launch& launch) {
  const Arena::Scope scope(*launch.arena);
  Exl3LinearParams* jobs =
      launch.arena->Take<Exl3LinearParams>(static_cast<int64_t>(params.size()));
  size_t count = 0;
  for (const LinearParams& p : params) {
    if (p.weights->exl3() != nullptr) jobs[count++] = {p.weights->exl3(), p.x, p.y, p.rounding};
  }
  if (count > 0) Exl3LinearBatchCpu({std::span<const Exl3LinearParams>(jobs, count)}, launch);
}

}  // namespace

int64_t LinearWeights::in_features() const {
  if (const Exl3Weights* w = exl3()) return w->k();
  if (const DenseWeights* w = dense()) return w->in();
  return 0;
}

int64_t LinearWeights::out_features() const {
  if (const Exl3Weights* w = exl3()) return w->n();
  if (const DenseWeights* w = dense()) return w->out();
  return 0;
}

size_t LinearWeights::bytes() const {
  if (const Exl3Weights* w = exl3()) return w->bytes();
  if (const DenseWeights* w = dense()) return w->bytes();
  return 0;
}

void LinearBatchCpu(const LinearBatchParams& params, const Launch& launch) {
  CHECK_LE(static_cast<int64_t>(params.jobs.size()), kMaxLinearJobs);
  for (const LinearParams& p : params.jobs)
    CHECK(p.weights != nullptr && !p.weights->empty()) << "a linear without weights";
  Exl3Batch(params.jobs, launch);
  DenseBatch(params.jobs, launch);
}

void LinearCpu(const LinearParams& params, const Launch& launch) {
  LinearBatchCpu({std::span<const LinearParams>(&params, 1)}, launch);
}

size_t LinearScratchBytes(const LinearWeights& weights, int64_t rows, int num_threads) {
  const size_t lists = sizeof(Exl3LinearParams) + sizeof(DenseJob) + 4 * Arena::kAlign;
  if (weights.exl3() != nullptr) {
    const Exl3ScratchShape shape = {rows, weights.in_features()};
    return lists +
           Exl3LinearScratchBytes(std::span<const Exl3ScratchShape>(&shape, 1), num_threads);
  }
  const int64_t floats = num_threads * kDenseThreadFloats +
                         std::min(rows, kDenseRowBlock) * (weights.in_features() + kRowPadding);
  return lists + static_cast<size_t>(floats) * sizeof(float);
}

}  // namespace twinspark
#endif  // HWY_ONCE
