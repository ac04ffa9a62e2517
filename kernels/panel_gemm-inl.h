// The inner product of every CPU linear: up to six rows times 2 * N columns, f32 accumulation, one
// FMA chain per output in the order of the steps. What a panel holds is the caller's: decoded EXL3
// tiles, strips of f32 or bf16 weights. Included once per SIMD target (see kernels/README.md).
#if defined(TWINSPARK_KERNELS_PANEL_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWINSPARK_KERNELS_PANEL_GEMM_INL_H_
#undef TWINSPARK_KERNELS_PANEL_GEMM_INL_H_
#else
#define TWINSPARK_KERNELS_PANEL_GEMM_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// Lanes of a panel vector: at most 16 (one pair of EXL3 tiles). Scalable vectors count as 128 bits,
// the least that they have.
#if HWY_TARGET == HWY_SCALAR
inline constexpr size_t kPanelLanes = 1;
#elif HWY_HAVE_SCALABLE
inline constexpr size_t kPanelLanes = 4;
#else
inline constexpr size_t kPanelLanes =
    HWY_MAX_BYTES / sizeof(float) < 16 ? HWY_MAX_BYTES / sizeof(float) : 16;
#endif
using PanelF32 = hn::CappedTag<float, kPanelLanes>;
using PanelU32 = hn::RebindToUnsigned<PanelF32>;
using PanelI32 = hn::RebindToSigned<PanelF32>;
using PanelVF = hn::VFromD<PanelF32>;
using PanelVU = hn::VFromD<PanelU32>;

inline constexpr size_t kPanelRows = 6;  // 12 accumulators + 2 weights + 1 broadcast: 16 registers

HWY_INLINE PanelVF LoadWeights(const float* HWY_RESTRICT p) {
  return hn::LoadU(PanelF32(), p);
}
HWY_INLINE PanelVF LoadWeights(const uint16_t* HWY_RESTRICT p) {  // bf16 bits
  const PanelU32 du;
  const hn::Rebind<uint16_t, PanelU32> d16;
  return hn::BitCast(PanelF32(), hn::ShiftLeft<16>(hn::PromoteTo(du, hn::LoadU(d16, p))));
}

HWY_INLINE PanelVF LoadWeights(const hwy::float16_t* HWY_RESTRICT p) {
  const PanelF32 d;
  const hn::Rebind<hwy::float16_t, PanelF32> d16;
  return hn::PromoteTo(d, hn::LoadU(d16, p));
}

// z0[r], z1[r] += sum over steps of x[r][step] * (w0, w1)[step], for R rows.
// x: R rows of `steps` floats, x_stride apart; w0, w1: N weights per step, w_stride apart;
// z0, z1: N floats per row, z_stride apart.
template <size_t R, class W>
HWY_NOINLINE void PanelRows(const float* HWY_RESTRICT x,
                            size_t x_stride,
                            const W* HWY_RESTRICT w0,
                            const W* HWY_RESTRICT w1,
                            size_t w_stride,
                            size_t steps,
                            float* HWY_RESTRICT z0,
                            float* HWY_RESTRICT z1,
                            size_t z_stride) {
  static_assert(R >= 1 && R <= kPanelRows);
  const PanelF32 d;
  // Rows above R alias row 0 and are never stored: the compiler drops them.
  constexpr size_t k1 = R > 1 ? 1 : 0, k2 = R > 2 ? 2 : 0, k3 = R > 3 ? 3 : 0;
  constexpr size_t k4 = R > 4 ? 4 : 0, k5 = R > 5 ? 5 : 0;
  PanelVF a0 = hn::LoadU(d, z0), b0 = hn::LoadU(d, z1);
  PanelVF a1 = hn::LoadU(d, z0 + k1 * z_stride), b1 = hn::LoadU(d, z1 + k1 * z_stride);
  PanelVF a2 = hn::LoadU(d, z0 + k2 * z_stride), b2 = hn::LoadU(d, z1 + k2 * z_stride);
  PanelVF a3 = hn::LoadU(d, z0 + k3 * z_stride), b3 = hn::LoadU(d, z1 + k3 * z_stride);
  PanelVF a4 = hn::LoadU(d, z0 + k4 * z_stride), b4 = hn::LoadU(d, z1 + k4 * z_stride);
  PanelVF a5 = hn::LoadU(d, z0 + k5 * z_stride), b5 = hn::LoadU(d, z1 + k5 * z_stride);
  const float* HWY_RESTRICT x1 = x + k1 * x_stride;
  const float* HWY_RESTRICT x2 = x + k2 * x_stride;
  const float* HWY_RESTRICT x3 = x + k3 * x_stride;
  const float* HWY_RESTRICT x4 = x + k4 * x_stride;
  const float* HWY_RESTRICT x5 = x + k5 * x_stride;
  for (size_t s = 0; s < steps; ++s) {
    const PanelVF u = LoadWeights(w0 + s * w_stride);
    const PanelVF v = LoadWeights(w1 + s * w_stride);
    const auto row = [&](const float* HWY_RESTRICT xr, PanelVF& a, PanelVF& b) HWY_ATTR {
      const PanelVF xs = hn::Set(d, xr[s]);
      a = hn::MulAdd(xs, u, a);
      b = hn::MulAdd(xs, v, b);
    };
    row(x, a0, b0);
    if constexpr (R > 1) row(x1, a1, b1);
    if constexpr (R > 2) row(x2, a2, b2);
    if constexpr (R > 3) row(x3, a3, b3);
    if constexpr (R > 4) row(x4, a4, b4);
    if constexpr (R > 5) row(x5, a5, b5);
  }
  const auto store = [&](size_t r, PanelVF a, PanelVF b) HWY_ATTR {
    hn::StoreU(a, d, z0 + r * z_stride);
    hn::StoreU(b, d, z1 + r * z_stride);
  };
  store(0, a0, b0);
  if constexpr (R > 1) store(1, a1, b1);
  if constexpr (R > 2) store(2, a2, b2);
  if constexpr (R > 3) store(3, a3, b3);
  if constexpr (R > 4) store(4, a4, b4);
  if constexpr (R > 5) store(5, a5, b5);
}

// One row times four vectors of columns: with two, the latency of a multiply-add would bind. The
// same chain per output as PanelRows.
template <class W>
HWY_NOINLINE void PanelOneRowWide(const float* HWY_RESTRICT x,
                                  const W* HWY_RESTRICT w0,
                                  const W* HWY_RESTRICT w1,
                                  const W* HWY_RESTRICT w2,
                                  const W* HWY_RESTRICT w3,
                                  size_t w_stride,
                                  size_t steps,
                                  float* HWY_RESTRICT z0,
                                  float* HWY_RESTRICT z1,
                                  float* HWY_RESTRICT z2,
                                  float* HWY_RESTRICT z3) {
  const PanelF32 d;
  PanelVF a0 = hn::LoadU(d, z0), a1 = hn::LoadU(d, z1);
  PanelVF a2 = hn::LoadU(d, z2), a3 = hn::LoadU(d, z3);
  for (size_t s = 0; s < steps; ++s) {
    const PanelVF xs = hn::Set(d, x[s]);
    a0 = hn::MulAdd(xs, LoadWeights(w0 + s * w_stride), a0);
    a1 = hn::MulAdd(xs, LoadWeights(w1 + s * w_stride), a1);
    a2 = hn::MulAdd(xs, LoadWeights(w2 + s * w_stride), a2);
    a3 = hn::MulAdd(xs, LoadWeights(w3 + s * w_stride), a3);
  }
  hn::StoreU(a0, d, z0);
  hn::StoreU(a1, d, z1);
  hn::StoreU(a2, d, z2);
  hn::StoreU(a3, d, z3);
}

// Any number of rows, in blocks of kPanelRows.
template <class W>
HWY_INLINE void PanelGemm(const float* HWY_RESTRICT x,
                          size_t x_stride,
                          size_t rows,
                          const W* HWY_RESTRICT w0,
                          const W* HWY_RESTRICT w1,
                          size_t w_stride,
                          size_t steps,
                          float* HWY_RESTRICT z0,
                          float* HWY_RESTRICT z1,
                          size_t z_stride) {
  while (rows > 0) {
    const size_t now = rows < kPanelRows ? rows : kPanelRows;
    switch (now) {
      case 1:
        PanelRows<1>(x, x_stride, w0, w1, w_stride, steps, z0, z1, z_stride);
        break;
      case 2:
        PanelRows<2>(x, x_stride, w0, w1, w_stride, steps, z0, z1, z_stride);
        break;
      case 3:
        PanelRows<3>(x, x_stride, w0, w1, w_stride, steps, z0, z1, z_stride);
        break;
      case 4:
        PanelRows<4>(x, x_stride, w0, w1, w_stride, steps, z0, z1, z_stride);
        break;
      case 5:
        PanelRows<5>(x, x_stride, w0, w1, w_stride, steps, z0, z1, z_stride);
        break;
      default:
        PanelRows<6>(x, x_stride, w0, w1, w_stride, steps, z0, z1, z_stride);
    }
    x += now * x_stride;
    z0 += now * z_stride;
    z1 += now * z_stride;
    rows -= now;
  }
}

// The same for many rows of weights that are slow to read again: `panel_steps` steps at a time are
// widened to f32 in `panel` ([panel_steps][2][N]), which all rows reuse; weights that are f32
// already stay where they are and are only taken in those pieces.
template <class W>
HWY_INLINE void PanelGemmInPieces(const float* HWY_RESTRICT x,
                                  size_t x_stride,
                                  size_t rows,
                                  const W* HWY_RESTRICT w0,
                                  const W* HWY_RESTRICT w1,
                                  size_t w_stride,
                                  size_t steps,
                                  size_t panel_steps,
                                  float* HWY_RESTRICT panel,
                                  float* HWY_RESTRICT z0,
                                  float* HWY_RESTRICT z1,
                                  size_t z_stride) {
  const PanelF32 d;
  for (size_t s = 0; s < steps; s += panel_steps) {
    const size_t now = panel_steps < steps - s ? panel_steps : steps - s;
    const W* HWY_RESTRICT from0 = w0 + s * w_stride;
    const W* HWY_RESTRICT from1 = w1 + s * w_stride;
    if constexpr (sizeof(W) == sizeof(float)) {
      PanelGemm(x + s, x_stride, rows, from0, from1, w_stride, now, z0, z1, z_stride);
    } else {
      constexpr size_t kStride = 2 * kPanelLanes;
      for (size_t i = 0; i < now; ++i) {
        hn::StoreU(LoadWeights(from0 + i * w_stride), d, panel + i * kStride);
        hn::StoreU(LoadWeights(from1 + i * w_stride), d, panel + i * kStride + kPanelLanes);
      }
      const float* HWY_RESTRICT p = panel;
      PanelGemm(x + s, x_stride, rows, p, p + kPanelLanes, kStride, now, z0, z1, z_stride);
    }
  }
}

// Stores f32 lanes as bf16, round to nearest even; a NaN keeps its sign and becomes quiet.
HWY_INLINE void StoreBf16(PanelVF v, uint16_t* HWY_RESTRICT to) {
  const PanelF32 d;
  const PanelU32 du;
  const hn::Rebind<uint16_t, PanelU32> d16;
  const PanelVU bits = hn::BitCast(du, v);
  const PanelVU upper = hn::ShiftRight<16>(bits);
  const PanelVU odd = hn::And(upper, hn::Set(du, 1u));
  const PanelVU rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du, 0x7fffu)), odd));
  const PanelVU quiet = hn::Or(upper, hn::Set(du, 0x40u));
  const PanelVU result = hn::IfThenElse(hn::RebindMask(du, hn::Ne(v, v)), quiet, rounded);
  hn::StoreU(hn::TruncateTo(d16, result), d16, to);
  (void)d;
}

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#endif  // toggle
