// EXL3 linear on the CPU: rotate the input, multiply by decoded tiles, rotate the output. One unit
// of work is one block of 128 output columns of one matrix for all rows of a block of rows: its 4
// column pairs are decoded once (into registers for one row of a mul1 matrix, else into a
// first-level cache panel that all rows reuse), and its output transform needs nothing from other
// units.
#include "kernels/exl3/exl3_linear.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "common/check.h"
#include "kernels/exl3/exl3_decode_tile.h"
#include "kernels/exl3/exl3_job.h"
#include "kernels/exl3/hadamard.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/exl3/exl3_linear_cpu.cc"
#include "hwy/foreach_target.h"
// Highway needs its headers after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/exl3/exl3_decode-inl.h"
#include "kernels/exl3/hadamard-inl.h"
#include "kernels/panel_gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {

// The kernels of one (codebook, K).
struct TileKernels {
  void (*decode)(const uint32_t*, int, size_t, size_t, float*);
  void (*multiply)(const uint32_t*, size_t, size_t, const float*, float*, float*);  // null: none
};

template <int K>
constexpr TileKernels Mul1Kernels() {
  return {DecodeTiles<K>, MultiplyTiles<K>};
}

TileKernels KernelsOf(Exl3Codebook codebook, int bits) {
  constexpr TileKernels kMul1[8] = {Mul1Kernels<1>(), Mul1Kernels<2>(), Mul1Kernels<3>(),
                                    Mul1Kernels<4>(), Mul1Kernels<5>(), Mul1Kernels<6>(),
                                    Mul1Kernels<7>(), Mul1Kernels<8>()};
  CHECK(bits >= 1 && bits <= 8) << "K = " << bits;
  switch (codebook) {
    case Exl3Codebook::k3Inst:
      return {DecodeTilesAnyK<Exl3Codebook::k3Inst>, nullptr};
    case Exl3Codebook::kMcg:
      return {DecodeTilesAnyK<Exl3Codebook::kMcg>, nullptr};
    case Exl3Codebook::kMul1:
      return kMul1[bits - 1];
  }
  CHECK(false) << "codebook " << static_cast<int>(codebook);
  return {};
}

// One pair of tiles to f32 in the order of the panel with all 16 lanes: out[(2 step + half) 16 +
// lane].
void DecodePairTile(const uint32_t* words, int bits, Exl3Codebook codebook, float* out) {
  HWY_ALIGN float panel[32 * kPanelLanes];
  const TileKernels kernels = KernelsOf(codebook, bits);
  for (size_t sub = 0; sub < 16 / kPanelLanes; ++sub) {
    kernels.decode(words, bits, sub, 1, panel);
    for (size_t v = 0; v < 32; ++v)
      std::memcpy(out + v * 16 + sub * kPanelLanes, panel + v * kPanelLanes,
                  kPanelLanes * sizeof(float));
  }
}

// x as f32, `count` values.
void LoadRow(const ConstTensorView& x, int64_t row, int64_t begin, int64_t count, float* to) {
  switch (x.dtype) {
    case DType::kF32:
      std::memcpy(to, x.Row<float>(row) + begin, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::kBf16: {
      const uint16_t* from = reinterpret_cast<const uint16_t*>(x.Row<Bf16>(row) + begin);
      const PanelF32 d;
      const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
      int64_t i = 0;
      for (; i + lanes <= count; i += lanes)
        hn::StoreU(LoadWeights(from + i), d, to + i);
      for (; i < count; ++i)
        to[i] = ToF32(Bf16{from[i]});
      return;
    }
    case DType::kF16:
      for (int64_t i = 0; i < count; ++i)
        to[i] = ToF32(x.Row<F16>(row)[begin + i]);
      return;
    default:
      CHECK(false) << "input of an EXL3 linear is " << DTypeName(x.dtype);
  }
}

// One row's block of 128 channels, rotated, in natural order.
void RotateBlock(const Exl3Job& job, int64_t row, int64_t block, float* HWY_RESTRICT v) {
  const int64_t begin = block * 128;
  const int64_t count = std::clamp<int64_t>(job.x.cols - begin, 0, 128);
  LoadRow(job.x, row, begin, count, v);
  std::fill(v + count, v + 128, 0.0f);
  const float* HWY_RESTRICT suh = job.weights->suh().data() + begin;
  const PanelF32 d;
  const size_t lanes = hn::Lanes(d);
  for (size_t i = 0; i < 128; i += lanes)
    hn::StoreU(hn::Mul(hn::LoadU(d, v + i), hn::LoadU(d, suh + i)), d, v + i);
  if (job.rounding == Exl3Rounding::kF16Upstream) {
    for (size_t i = 0; i < 128; ++i)
      v[i] = ToF32(ToF16(v[i]));
  }
  HadamardBlock(v);
  const PanelVF scale = hn::Set(d, kHadamardScale);
  for (size_t i = 0; i < 128; i += lanes)
    hn::StoreU(hn::Mul(hn::LoadU(d, v + i), scale), d, v + i);
  if (job.rounding != Exl3Rounding::kNone) {
    for (size_t i = 0; i < 128; ++i)
      v[i] = ToF32(ToF16(v[i]));
  }
}

// Tasks [begin, end) of rows * blocks_in, block fastest, into job.xh.
void RotateInput(const Exl3Job& job, int64_t begin, int64_t end) {
  HWY_ALIGN float v[128];
  for (int64_t task = begin; task < end; ++task) {
    const int64_t row = task / job.blocks_in();
    const int64_t block = task % job.blocks_in();
    RotateBlock(job, row, block, v);
    // Ring order: pairs of rows 0 1 | 8 9 | 2 3 | 10 11 | ... of every 16.
    float* HWY_RESTRICT to = job.xh + row * job.xh_stride + block * 128;
    for (int64_t tile = 0; tile < 128; tile += 16) {
      for (int64_t pair = 0; pair < 4; ++pair) {
        std::memcpy(to + tile + 4 * pair, v + tile + 2 * pair, 2 * sizeof(float));
        std::memcpy(to + tile + 4 * pair + 2, v + tile + 8 + 2 * pair, 2 * sizeof(float));
      }
    }
  }
}

// z[rows][128] of block `block` from the f16 copy; z in the order [pair][half][lane]. One row takes
// four vectors of columns at a time, many rows take the weights in pieces widened to f32.
void MultiplyHalves(const Exl3Job& job,
                    int64_t block,
                    float* HWY_RESTRICT panel,
                    float* HWY_RESTRICT z) {
  constexpr size_t kMaxDirectRows = 12;
  constexpr size_t kN = kPanelLanes;
  const size_t k = static_cast<size_t>(job.weights->k());
  const size_t x_stride = static_cast<size_t>(job.xh_stride);
  const size_t rows = static_cast<size_t>(job.rows());
  // Columns c .. c + N of the block's order: [pair][half][16 lanes].
  const auto at = [&](size_t c) {
    const uint16_t* pair = job.weights->PairHalves(4 * block + static_cast<int64_t>(c / 32));
    return reinterpret_cast<const hwy::float16_t*>(pair) + c % 32;
  };
  if (rows == 1) {
    for (size_t c = 0; c < 128; c += 4 * kN) {
      PanelOneRowWide(job.xh, at(c), at(c + kN), at(c + 2 * kN), at(c + 3 * kN), 32, k, z + c,
                      z + c + kN, z + c + 2 * kN, z + c + 3 * kN);
    }
    return;
  }
  for (size_t c = 0; c < 128; c += 2 * kN) {
    if (rows <= kMaxDirectRows) {
      PanelGemm(job.xh, x_stride, rows, at(c), at(c + kN), 32, k, z + c, z + c + kN, 128);
    } else {
      PanelGemmInPieces(job.xh, x_stride, rows, at(c), at(c + kN), 32, k, kExl3PanelTiles * 16,
                        panel, z + c, z + c + kN, 128);
    }
  }
}

// The same from the trellis, for one row: decoded values never leave the registers.
void MultiplyOneRow(const Exl3Job& job, int64_t block, float* HWY_RESTRICT z) {
  const Exl3Weights& weights = *job.weights;
  const TileKernels kernels = KernelsOf(weights.codebook(), weights.bits());
  const size_t tiles = static_cast<size_t>(weights.k()) / 16;
  for (int64_t pair = 0; pair < 4; ++pair) {
    const uint32_t* words = weights.PairWords(4 * block + pair);
    for (size_t sub = 0; sub < 16 / kPanelLanes; ++sub) {
      float* z0 = z + 32 * pair + sub * kPanelLanes;
      kernels.multiply(words, sub, tiles, job.xh, z0, z0 + 16);
    }
  }
}

// The same for any number of rows: a panel of some tiles is decoded once and used by all rows; the
// columns run inside the tiles, so that a slice of xh is used by all columns while it is near.
void MultiplyPanels(const Exl3Job& job,
                    int64_t block,
                    float* HWY_RESTRICT panel,
                    float* HWY_RESTRICT z) {
  const Exl3Weights& weights = *job.weights;
  const TileKernels kernels = KernelsOf(weights.codebook(), weights.bits());
  const size_t tiles = static_cast<size_t>(weights.k()) / 16;
  const size_t tile_words = static_cast<size_t>(weights.bits()) * 16;
  const size_t rows = static_cast<size_t>(job.rows());
  const size_t x_stride = static_cast<size_t>(job.xh_stride);
  for (size_t t = 0; t < tiles; t += kExl3PanelTiles) {
    const size_t now = std::min<size_t>(kExl3PanelTiles, tiles - t);
    for (int64_t pair = 0; pair < 4; ++pair) {
      const uint32_t* words = weights.PairWords(4 * block + pair) + t * tile_words;
      for (size_t sub = 0; sub < 16 / kPanelLanes; ++sub) {
        kernels.decode(words, weights.bits(), sub, now, panel);
        float* z0 = z + 32 * pair + sub * kPanelLanes;
        const float* w0 = panel;
        constexpr size_t kStride = 2 * kPanelLanes;
        PanelGemm(job.xh + t * 16, x_stride, rows, w0, w0 + kPanelLanes, kStride, now * 16, z0,
                  z0 + 16, 128);
      }
    }
  }
}

// Output transform of one row's 128 sums and the store of those that y has.
void StoreOutput(const Exl3Job& job, int64_t row, int64_t block, const float* HWY_RESTRICT z) {
  HWY_ALIGN float v[128];
  // A pair's sums lie as [half][tile][8]; naturally they are [tile][half][8].
  for (int64_t pair = 0; pair < 128; pair += 32) {
    std::memcpy(v + pair, z + pair, 8 * sizeof(float));
    std::memcpy(v + pair + 8, z + pair + 16, 8 * sizeof(float));
    std::memcpy(v + pair + 16, z + pair + 8, 8 * sizeof(float));
    std::memcpy(v + pair + 24, z + pair + 24, 8 * sizeof(float));
  }
  HadamardBlock(v);
  const int64_t begin = block * 128;
  const int64_t count = std::min<int64_t>(128, job.y.cols - begin);
  const float* HWY_RESTRICT svh = job.weights->svh().data() + begin;
  const bool has_bias = !job.weights->bias().empty();
  const float* HWY_RESTRICT bias = has_bias ? job.weights->bias().data() + begin : nullptr;
  const PanelF32 d;
  const size_t lanes = hn::Lanes(d);
  const PanelVF scale = hn::Set(d, kHadamardScale);
  for (size_t i = 0; i < 128; i += lanes) {
    PanelVF y = hn::Mul(hn::Mul(hn::LoadU(d, v + i), scale), hn::LoadU(d, svh + i));
    if (has_bias) y = hn::Add(y, hn::LoadU(d, bias + i));
    hn::StoreU(y, d, v + i);
  }
  if (job.y.dtype == DType::kF32) {
    std::memcpy(job.y.Row<float>(row) + begin, v, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  uint16_t* to = reinterpret_cast<uint16_t*>(job.y.Row<Bf16>(row) + begin);
  HWY_ALIGN uint16_t rounded[128];
  for (size_t i = 0; i < 128; i += lanes)
    StoreBf16(hn::LoadU(d, v + i), rounded + i);
  std::memcpy(to, rounded, static_cast<size_t>(count) * sizeof(uint16_t));
}

// Block of 128 output columns of a job, all its rows. scratch: kExl3ThreadFloats, 64-byte aligned.
void MultiplyBlock(const Exl3Job& job, int64_t block, float* HWY_RESTRICT scratch) {
  if (block * 128 >= job.y.cols) return;  // padded outputs
  float* HWY_RESTRICT panel = scratch;
  float* HWY_RESTRICT z = scratch + kExl3PanelFloats;
  std::fill(z, z + job.rows() * 128, 0.0f);
  if (job.weights->form() == Exl3Weights::Form::kDecodedF16) {
    MultiplyHalves(job, block, panel, z);
  } else if (job.rows() == 1 && job.weights->codebook() == Exl3Codebook::kMul1) {
    MultiplyOneRow(job, block, z);
  } else {
    MultiplyPanels(job, block, panel, z);
  }
  for (int64_t row = 0; row < job.rows(); ++row)
    StoreOutput(job, row, block, z + row * 128);
}

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
namespace {

HWY_EXPORT(DecodePairTile);
HWY_EXPORT(RotateBlock);
HWY_EXPORT(RotateInput);
HWY_EXPORT(MultiplyBlock);

constexpr int64_t kRowPadding = 16;  // floats
// Below this many rotated values the calling thread does it alone: a barrier would cost more.
constexpr int64_t kMinParallelRotation = 4096;

void CheckShapes(const Exl3LinearParams& p) {
  CHECK(p.weights != nullptr);
  CHECK_LE(p.x.cols, p.weights->k());
  CHECK_LE(p.y.cols, p.weights->n());
  CHECK_EQ(p.x.rows, p.y.rows);
  CHECK(p.y.dtype == DType::kF32 || p.y.dtype == DType::kBf16) << DTypeName(p.y.dtype);
}

// Relative cost of a unit: decoding a column once and one multiplication per row.
double UnitCost(const Exl3Job& job) {
  return static_cast<double>(job.weights->k()) * (1.0 + 0.2 * static_cast<double>(job.rows()));
}

void RotateInputs(std::span<const Exl3Job> jobs, const Launch& launch) {
  int64_t num_tasks = 0;
  for (const Exl3Job& job : jobs)
    num_tasks += job.rows() * job.blocks_in();
  const auto run = [&](int64_t begin, int64_t end) {
    int64_t first = 0;  // of the job, among all tasks
    for (const Exl3Job& job : jobs) {
      const int64_t count = job.rows() * job.blocks_in();
      const int64_t from = std::max(begin, first);
      const int64_t to = std::min(end, first + count);
      if (from < to) HWY_DYNAMIC_DISPATCH(RotateInput)(job, from - first, to - first);
      first += count;
    }
  };
  if (num_tasks * 128 < kMinParallelRotation) {
    run(0, num_tasks);
  } else {
    launch.pool->ParallelFor(num_tasks, 8,
                             [&](int64_t begin, int64_t end, int) { run(begin, end); });
  }
}

// Units in equal shares of cost, one contiguous range for every thread.
void MultiplyAll(std::span<const Exl3Job> jobs, float* scratch, const Launch& launch) {
  double total = 0.0;
  for (const Exl3Job& job : jobs)
    total += UnitCost(job) * static_cast<double>(job.blocks_out());
  const int64_t shares = launch.pool->num_threads();
  launch.pool->ParallelFor(shares, 1, [&](int64_t begin, int64_t end, int thread_idx) {
    const double from = total * static_cast<double>(begin) / static_cast<double>(shares);
    const double to = total * static_cast<double>(end) / static_cast<double>(shares);
    float* own = scratch + thread_idx * kExl3ThreadFloats;
    double middle = 0.0;  // of the unit, on the axis of cost
    for (const Exl3Job& job : jobs) {
      const double cost = UnitCost(job);
      middle += 0.5 * cost;
      for (int64_t block = 0; block < job.blocks_out(); ++block, middle += cost) {
        if (middle >= from && middle < to) HWY_DYNAMIC_DISPATCH(MultiplyBlock)(job, block, own);
      }
      middle -= 0.5 * cost;
    }
  });
}

}  // namespace

void Exl3LinearBatchCpu(const Exl3LinearBatchParams& params, const Launch& launch) {
  const Arena::Scope scope(*launch.arena);
  int64_t max_rows = 0;
  for (const Exl3LinearParams& p : params.jobs) {
    CheckShapes(p);
    max_rows = std::max(max_rows, p.x.rows);
  }
  const int64_t num_jobs = static_cast<int64_t>(params.jobs.size());
  if (max_rows == 0) return;
  Exl3Job* jobs = launch.arena->Take<Exl3Job>(num_jobs);
  float* scratch = launch.arena->Take<float>(launch.pool->num_threads() * kExl3ThreadFloats);
  for (int64_t first = 0; first < max_rows; first += kExl3RowBlock) {
    const Arena::Scope block_scope(*launch.arena);
    int64_t active = 0;
    for (const Exl3LinearParams& p : params.jobs) {
      const int64_t rows = std::min(kExl3RowBlock, p.x.rows - first);
      if (rows <= 0) continue;
      const int64_t stride = p.weights->k() + kRowPadding;
      jobs[active++] = {p.weights,
                        p.x.Rows(first, rows),
                        p.y.Rows(first, rows),
                        p.rounding,
                        launch.arena->Take<float>(rows * stride),
                        stride};
    }
    const std::span<const Exl3Job> now(jobs, static_cast<size_t>(active));
    RotateInputs(now, launch);
    MultiplyAll(now, scratch, launch);
  }
}

void Exl3LinearCpu(const Exl3LinearParams& params, const Launch& launch) {
  Exl3LinearBatchCpu({std::span<const Exl3LinearParams>(&params, 1)}, launch);
}

size_t Exl3LinearScratchBytes(std::span<const Exl3ScratchShape> jobs, int num_threads) {
  size_t bytes =
      static_cast<size_t>(num_threads) * kExl3ThreadFloats * sizeof(float) + Arena::kAlign;
  for (const Exl3ScratchShape& job : jobs) {
    const int64_t rows = std::min(job.rows, kExl3RowBlock);
    bytes += static_cast<size_t>(rows * (job.k + kRowPadding)) * sizeof(float);
    bytes += sizeof(Exl3Job) + 2 * Arena::kAlign;
  }
  return bytes;
}

void Exl3DecodePairTile(const uint32_t* words, int bits, Exl3Codebook codebook, float* out) {
  HWY_DYNAMIC_DISPATCH(DecodePairTile)(words, bits, codebook, out);
}

void Exl3Decode(const Exl3Weights& weights, std::span<F16> wq) {
  CHECK_EQ(static_cast<int64_t>(wq.size()), weights.k() * weights.n());
  float values[512];
  for (int64_t pair = 0; pair < weights.n() / 32; ++pair) {
    for (int64_t kt = 0; kt < weights.k() / 16; ++kt) {
      if (weights.form() == Exl3Weights::Form::kTrellis) {
        Exl3DecodePairTile(weights.PairWords(pair) + kt * weights.bits() * 16, weights.bits(),
                           weights.codebook(), values);
      } else {
        for (int64_t i = 0; i < 512; ++i)
          values[i] = ToF32(F16{weights.PairHalves(pair)[kt * 512 + i]});
      }
      for (int64_t i = 0; i < 512; ++i) {
        const int64_t row = 16 * kt + kExl3RowOrder[static_cast<size_t>(i / 32)];
        const int64_t half = (i / 16) % 2;
        const int64_t lane = i % 16;
        const int64_t col = 32 * pair + 16 * (lane / 8) + 8 * half + lane % 8;
        wq[static_cast<size_t>(row * weights.n() + col)] = ToF16(values[i]);
      }
    }
  }
}

void Exl3RotateInput(const Exl3LinearParams& params, std::span<float> xh) {
  CHECK(params.weights != nullptr);
  CHECK_LE(params.x.cols, params.weights->k());
  CHECK_EQ(static_cast<int64_t>(xh.size()), params.x.rows * params.weights->k());
  const Exl3Job job = {params.weights, params.x, TensorView(), params.rounding, nullptr, 0};
  for (int64_t row = 0; row < params.x.rows; ++row) {
    for (int64_t block = 0; block < job.blocks_in(); ++block)
      HWY_DYNAMIC_DISPATCH(RotateBlock)
    (job, row, block, xh.data() + row * params.weights->k() + block * 128);
  }
}

}  // namespace twinspark
#endif  // HWY_ONCE
