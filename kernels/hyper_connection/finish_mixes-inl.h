// What becomes of the dot products of HcMix: sigmoids, softmax and Sinkhorn rounds, once per SIMD
// target. Two ways with the same bits, as every step is lane by lane and every sum ascends:
//   FinishRows     one row per lane, any number of streams: many rows
//   FinishFewRows  four streams, one row per four lanes, a vector per line of the 4x4 matrix, which
//                  is transposed between half rounds: one division each, where the other way has
//                  four that wait for each other's unit; few rows, which wait for nothing else

// clang-format off
#if defined(TWINSPARK_KERNELS_FINISH_MIXES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWINSPARK_KERNELS_FINISH_MIXES_INL_H_
#undef TWINSPARK_KERNELS_FINISH_MIXES_INL_H_
#else
#define TWINSPARK_KERNELS_FINISH_MIXES_INL_H_
#endif
// clang-format on

#include <algorithm>
#include <cstdint>

#include "hwy/highway.h"
#include "kernels/exp-inl.h"
#include "kernels/hyper_connection/hyper_connection.h"
#include "kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {

// Finishes the mixes of up to MaxLanes(D) rows at once, one row per lane (every step is lane-wise,
// so a row's bits do not depend on its lane or on the number of lanes). m: [num_mixes][lanes].
template <class D>
HWY_INLINE void FinishMixes(D d, const HcMixParams& p, float* HWY_RESTRICT m) {
  using V = hn::Vec<D>;
  const int n = static_cast<int>(p.pre.cols);
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const float* base = p.base.Row<float>(0);
  const float* scale = p.scale.Row<float>(0);
  const V one = hn::Set(d, 1.0f), eps = hn::Set(d, p.hc_eps);
  const auto term = [&](int i, int which) HWY_ATTR {
    const V scaled = hn::Mul(hn::Load(d, m + i * lanes), hn::Set(d, scale[which]));
    return hn::Add(scaled, hn::Set(d, base[i]));
  };
  const auto sigmoid = [&](V x)
                           HWY_ATTR { return hn::Div(one, hn::Add(one, hn::Exp(d, hn::Neg(x)))); };
  for (int i = 0; i < n; ++i)
    hn::Store(hn::Add(sigmoid(term(i, 0)), eps), d, m + i * lanes);
  for (int i = n; i < 2 * n; ++i) {
    const V half = sigmoid(term(i, 1));
    hn::Store(hn::Add(half, half), d, m + i * lanes);
  }
  // Row softmax.
  for (int i = 0; i < n; ++i) {
    const int first = 2 * n + i * n;
    V largest = term(first, 2);
    for (int j = 1; j < n; ++j)
      largest = hn::Max(largest, term(first + j, 2));
    V sum = hn::Zero(d);
    for (int j = 0; j < n; ++j) {
      const V e = hn::Exp(d, hn::Sub(term(first + j, 2), largest));
      sum = hn::Add(sum, e);
      hn::Store(e, d, m + (first + j) * lanes);
    }
    const V inverse = hn::Div(one, sum);
    for (int j = 0; j < n; ++j) {
      float* k = m + (first + j) * lanes;
      hn::Store(hn::MulAdd(hn::Load(d, k), inverse, eps), d, k);
    }
  }
  // Sinkhorn: columns, then (iters - 1) times rows and columns.
  float* matrix = m + 2 * n * lanes;
  const auto divide = [&](int stride, int step) HWY_ATTR {
    for (int i = 0; i < n; ++i) {
      float* line = matrix + i * stride * lanes;
      V sum = hn::Load(d, line);
      for (int j = 1; j < n; ++j)
        sum = hn::Add(sum, hn::Load(d, line + j * step * lanes));
      const V inverse = hn::Div(one, hn::Add(sum, eps));
      for (int j = 0; j < n; ++j) {
        float* at = line + j * step * lanes;
        hn::Store(hn::Mul(hn::Load(d, at), inverse), d, at);
      }
    }
  };
  divide(1, n);
  for (int round = 1; round < p.sinkhorn_iters; ++round) {
    divide(n, 1);
    divide(1, n);
  }
}

// Rows [begin, end), at most MaxLanes(D), whose dot products are dots[row][num_mixes].
template <class D>
void FinishRows(D d, const HcMixParams& p, const float* dots, int64_t begin, int64_t end) {
  constexpr int kMaxMixes = 2 * kMaxStreams + kMaxStreams * kMaxStreams;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t num_mixes = p.fn.rows, n = p.pre.cols;
  HWY_ALIGN float m[static_cast<size_t>(kMaxMixes) * hn::MaxLanes(D())];
  for (int64_t i = 0; i < num_mixes; ++i) {
    for (int64_t r = 0; r < lanes; ++r) {
      m[i * lanes + r] = begin + r < end ? dots[r * num_mixes + i] : 0.0f;
    }
  }
  FinishMixes(d, p, m);
  for (int64_t t = begin; t < end; ++t) {
    const float* lane = m + (t - begin);
    for (int64_t i = 0; i < n; ++i)
      p.pre.Row<float>(t)[i] = lane[i * lanes];
    for (int64_t i = 0; i < n; ++i)
      p.post.Row<float>(t)[i] = lane[(n + i) * lanes];
    for (int64_t i = 0; i < n * n; ++i)
      p.comb.Row<float>(t)[i] = lane[(2 * n + i) * lanes];
  }
}

// Whole rows of the 4 x 4 matrices of few rows: FinishFewRows can be used.
constexpr int64_t kFewStreams = 4;
constexpr int64_t kFewRows = static_cast<int64_t>(hn::MaxLanes(DF())) / kFewStreams;

#if HWY_TARGET != HWY_SCALAR
// Transposes the 4 x 4 matrix in every four lanes.
HWY_INLINE void Transpose4(DF d, VF* line) {
  const hn::Repartition<uint64_t, DF> d64;
  const auto pairs = [&](VF v) HWY_ATTR { return hn::BitCast(d64, v); };
  const auto low01 = pairs(hn::InterleaveLower(d, line[0], line[1]));
  const auto low23 = pairs(hn::InterleaveLower(d, line[2], line[3]));
  const auto high01 = pairs(hn::InterleaveUpper(d, line[0], line[1]));
  const auto high23 = pairs(hn::InterleaveUpper(d, line[2], line[3]));
  line[0] = hn::BitCast(d, hn::InterleaveLower(d64, low01, low23));
  line[1] = hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23));
  line[2] = hn::BitCast(d, hn::InterleaveLower(d64, high01, high23));
  line[3] = hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23));
}

// Rows [begin, end), at most kFewRows, of four streams.
inline void FinishFewRows(const HcMixParams& p, const float* dots, int64_t begin, int64_t end) {
  const DF d;
  constexpr int64_t n = kFewStreams, kLanes = static_cast<int64_t>(hn::MaxLanes(DF()));
  constexpr int64_t kMixes = 2 * n + n * n;
  const float* base = p.base.Row<float>(0);
  const float* scale = p.scale.Row<float>(0);
  const VF one = hn::Set(d, 1.0f), eps = hn::Set(d, p.hc_eps);
  HWY_ALIGN float terms[kMixes / n * kLanes] = {};  // [pre, post, four lines][row][4]
  for (int64_t t = begin; t < end; ++t) {
    for (int64_t i = 0; i < kMixes; ++i) {
      const float scaled = dots[(t - begin) * kMixes + i] * scale[std::min<int64_t>(i / n, 2)];
      terms[i / n * kLanes + (t - begin) * n + i % n] = scaled + base[i];
    }
  }
  const auto sigmoid = [&](VF x)
                           HWY_ATTR { return hn::Div(one, hn::Add(one, hn::Exp(d, hn::Neg(x)))); };
  const VF pre = hn::Add(sigmoid(hn::Load(d, terms)), eps);
  const VF half = sigmoid(hn::Load(d, terms + kLanes));
  VF line[n];
  TWINSPARK_UNROLL
  for (int i = 0; i < n; ++i)
    line[i] = hn::Load(d, terms + (2 + i) * kLanes);
  const auto sum = [&]() HWY_ATTR {
    return hn::Add(hn::Add(hn::Add(line[0], line[1]), line[2]), line[3]);
  };
  Transpose4(d, line);  // a lane is a row of the matrix
  const VF largest = hn::Max(hn::Max(hn::Max(line[0], line[1]), line[2]), line[3]);
  TWINSPARK_UNROLL
  for (int i = 0; i < n; ++i)
    line[i] = hn::Exp(d, hn::Sub(line[i], largest));
  const VF of_row = hn::Div(one, sum());
  TWINSPARK_UNROLL
  for (int i = 0; i < n; ++i)
    line[i] = hn::MulAdd(line[i], of_row, eps);
  for (int half_round = 0; half_round < 2 * p.sinkhorn_iters - 1; ++half_round) {
    Transpose4(d, line);
    const VF inverse = hn::Div(one, hn::Add(sum(), eps));
    TWINSPARK_UNROLL
    for (int i = 0; i < n; ++i)
      line[i] = hn::Mul(line[i], inverse);
  }
  // Columns came last, so a vector is a row again.
  hn::Store(pre, d, terms);
  hn::Store(hn::Add(half, half), d, terms + kLanes);
  TWINSPARK_UNROLL
  for (int i = 0; i < n; ++i)
    hn::Store(line[i], d, terms + (2 + i) * kLanes);
  for (int64_t t = begin; t < end; ++t) {
    const float* of = terms + (t - begin) * n;
    std::copy_n(of, n, p.pre.Row<float>(t));
    std::copy_n(of + kLanes, n, p.post.Row<float>(t));
    for (int64_t i = 0; i < n; ++i)
      std::copy_n(of + (2 + i) * kLanes, n, p.comb.Row<float>(t) + i * n);
  }
}
#endif

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
