// Residual streams on the CPU. HcMix is the costly one (24 dot products over 4 * d values per row
// and sublayer): rows share the loads of fn. Sigmoids and Sinkhorn run with one row per lane; a
// division by a sum is a multiplication by its reciprocal.
#include "kernels/hyper_connection/hyper_connection.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/hyper_connection/hyper_connection_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/dot-inl.h"
#include "kernels/exp-inl.h"
#include "kernels/parallel_rows.h"
#include "kernels/row_norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

template <class T>
void CollapseRow(const T* streams, const float* pre, int64_t d_model, int num_streams, T* out) {
  const DF d;
  ForVectors(d, d_model, [&](const auto& load, const auto& store) HWY_ATTR {
    VF sum = hn::Mul(hn::Set(d, pre[0]), load(streams));
    for (int c = 1; c < num_streams; ++c) {
      sum = hn::MulAdd(hn::Set(d, pre[c]), load(streams + c * d_model), sum);
    }
    store(sum, out);
  });
}

void CollapseNormRows(const CollapseNormParams& p, char* scratch, int64_t begin, int64_t end) {
  const float* weight = p.weight.Row<float>(0);
  const int num_streams = static_cast<int>(p.pre.cols);
  const int64_t d_model = p.out.cols;
  WithFloatType(p.streams.dtype, [&](auto* in_type) {
    WithFloatType(p.out.dtype, [&](auto* out_type) {
      using In = std::remove_pointer_t<decltype(in_type)>;
      using Out = std::remove_pointer_t<decltype(out_type)>;
      for (int64_t t = begin; t < end; ++t) {
        In* collapsed =
            p.collapsed.data != nullptr ? p.collapsed.Row<In>(t) : reinterpret_cast<In*>(scratch);
        CollapseRow(p.streams.Row<In>(t), p.pre.Row<float>(t), d_model, num_streams, collapsed);
        NormRow(collapsed, weight, d_model, p.eps, p.out.Row<Out>(t));
      }
    });
  });
}

constexpr int64_t kRowsAtOnce = 2 * kDotRows;
constexpr int64_t kMostLanes = 8;  // wider divisions take longer

// m[num_mixes] of rows [begin, end), not yet multiplied by the inverse rms.
void MixDots(const HcMixParams& p, int64_t begin, int64_t end, float* dots) {
  WithFloatType(p.streams.dtype, [&](auto* in_type) {
    using In = std::remove_pointer_t<decltype(in_type)>;
    const int64_t num_mixes = p.fn.rows;
    DotBlock([&](int64_t r) { return p.streams.Row<In>(begin + r); }, end - begin,
             [&](int64_t j) { return p.fn.Row<float>(j); }, num_mixes, p.fn.cols, dots, num_mixes);
    for (int64_t r = 0; r < end - begin; ++r) {
      const float inverse_rms = InverseRms(p.streams.Row<In>(begin + r), p.fn.cols, p.norm_eps);
      for (int64_t j = 0; j < num_mixes; ++j)
        dots[r * num_mixes + j] *= inverse_rms;
    }
  });
}

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

void HcMixRows(const HcMixParams& p, int64_t begin, int64_t end) {
  float dots[kRowsAtOnce * (2 * kMaxStreams + kMaxStreams * kMaxStreams)];
  const hn::CappedTag<float, 4> few;
  const hn::CappedTag<float, kMostLanes> many;
  for (int64_t t = begin; t < end; t += kRowsAtOnce) {
    const int64_t stop = std::min(end, t + kRowsAtOnce);
    MixDots(p, t, stop, dots);
    const bool is_few = stop - t <= 4;
    const int64_t step = static_cast<int64_t>(is_few ? hn::Lanes(few) : hn::Lanes(many));
    for (int64_t r = t; r < stop; r += step) {
      const float* row_dots = dots + (r - t) * p.fn.rows;
      if (is_few) {
        FinishRows(few, p, row_dots, r, std::min(stop, r + step));
      } else {
        FinishRows(many, p, row_dots, r, std::min(stop, r + step));
      }
    }
  }
}

template <class Y, class S, class Out>
void PostRow(const Y* y,
             const S* streams,
             const float* post,
             const float* comb,
             int64_t d_model,
             int num_streams,
             Out* out) {
  const DF d;
  ForVectors(d, d_model, [&](const auto& load, const auto& store) HWY_ATTR {
    VF in[kMaxStreams];
    for (int i = 0; i < num_streams; ++i)
      in[i] = load(streams + i * d_model);
    const VF yv = load(y);
    for (int j = 0; j < num_streams; ++j) {
      VF sum = hn::Mul(hn::Set(d, post[j]), yv);
      for (int i = 0; i < num_streams; ++i) {
        sum = hn::MulAdd(hn::Set(d, comb[i * num_streams + j]), in[i], sum);
      }
      store(sum, out + j * d_model);
    }
  });
}

void HcPostRows(const HcPostParams& p, int64_t begin, int64_t end) {
  const int num_streams = static_cast<int>(p.post.cols);
  WithFloatType(p.y.dtype, [&](auto* y_type) {
    WithFloatType(p.streams.dtype, [&](auto* s_type) {
      using Y = std::remove_pointer_t<decltype(y_type)>;
      using S = std::remove_pointer_t<decltype(s_type)>;
      for (int64_t t = begin; t < end; ++t) {
        PostRow(p.y.Row<Y>(t), p.streams.Row<S>(t), p.post.Row<float>(t), p.comb.Row<float>(t),
                p.y.cols, num_streams, p.out.Row<S>(t));
      }
    });
  });
}

void StreamMeanRows(const StreamMeanParams& p, int64_t begin, int64_t end) {
  const DF d;
  const int64_t d_model = p.out.cols;
  const VF inverse = hn::Set(d, 1.0f / static_cast<float>(p.num_streams));
  WithFloatType(p.streams.dtype, [&](auto* in_type) {
    WithFloatType(p.out.dtype, [&](auto* out_type) {
      using In = std::remove_pointer_t<decltype(in_type)>;
      using Out = std::remove_pointer_t<decltype(out_type)>;
      for (int64_t t = begin; t < end; ++t) {
        const In* in = p.streams.Row<In>(t);
        Out* out = p.out.Row<Out>(t);
        ForVectors(d, d_model, [&](const auto& load, const auto& store) HWY_ATTR {
          VF sum = load(in);
          for (int c = 1; c < p.num_streams; ++c)
            sum = hn::Add(sum, load(in + c * d_model));
          store(hn::Mul(sum, inverse), out);
        });
      }
    });
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
namespace {

HWY_EXPORT(CollapseNormRows);
HWY_EXPORT(HcMixRows);
HWY_EXPORT(HcPostRows);
HWY_EXPORT(StreamMeanRows);

void CheckStreams(int64_t num_streams, int64_t stream_cols, int64_t d_model) {
  CHECK(num_streams >= 1 && num_streams <= kMaxStreams) << num_streams;
  CHECK_EQ(stream_cols, num_streams * d_model);
}

}  // namespace

void CollapseNormCpu(const CollapseNormParams& params, const Launch& launch) {
  CheckStreams(params.pre.cols, params.streams.cols, params.out.cols);
  CHECK_EQ(params.streams.rows, params.out.rows);
  CHECK_EQ(params.pre.rows, params.out.rows);
  CHECK_EQ(params.weight.cols, params.out.cols);
  if (params.collapsed.data != nullptr) CHECK(params.collapsed.dtype == params.streams.dtype);
  const Arena::Scope scope(*launch.arena);
  const int64_t row_bytes = params.out.cols * static_cast<int64_t>(sizeof(float));
  char* scratch = launch.arena->Take<char>(row_bytes * NumThreads(launch));
  const int64_t grain = RowGrain(0.15 * static_cast<double>(params.streams.cols));
  ParallelRows(launch, params.out.rows, grain, [&](int64_t begin, int64_t end, int thread_idx) {
    HWY_DYNAMIC_DISPATCH(CollapseNormRows)(params, scratch + thread_idx * row_bytes, begin, end);
  });
}

void HcMixCpu(const HcMixParams& params, const Launch& launch) {
  const int64_t n = params.pre.cols;
  CHECK(n >= 1 && n <= kMaxStreams) << n;
  CHECK_EQ(params.fn.rows, 2 * n + n * n);
  CHECK_EQ(params.fn.cols, params.streams.cols);
  CHECK_EQ(params.base.cols, params.fn.rows);
  CHECK_EQ(params.comb.cols, n * n);
  CHECK_EQ(params.pre.rows, params.streams.rows);
  CHECK(params.fn.dtype == DType::kF32);
  const int64_t grain = RowGrain(0.03 * static_cast<double>(params.fn.rows * params.fn.cols));
  ParallelRows(launch, params.streams.rows, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(HcMixRows)(params, begin, end);
  });
}

void HcPostCpu(const HcPostParams& params, const Launch& launch) {
  CheckStreams(params.post.cols, params.streams.cols, params.y.cols);
  CHECK_EQ(params.streams.rows, params.y.rows);
  CHECK_EQ(params.out.rows, params.y.rows);
  CHECK_EQ(params.out.cols, params.streams.cols);
  CHECK_EQ(params.comb.cols, params.post.cols * params.post.cols);
  CHECK(params.out.dtype == params.streams.dtype);
  const int64_t grain = RowGrain(0.3 * static_cast<double>(params.streams.cols));
  ParallelRows(launch, params.y.rows, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(HcPostRows)(params, begin, end);
  });
}

void StreamMeanCpu(const StreamMeanParams& params, const Launch& launch) {
  CheckStreams(params.num_streams, params.streams.cols, params.out.cols);
  CHECK_EQ(params.streams.rows, params.out.rows);
  const int64_t grain = RowGrain(0.1 * static_cast<double>(params.streams.cols));
  ParallelRows(launch, params.out.rows, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(StreamMeanRows)(params, begin, end);
  });
}

}  // namespace twinspark
#endif  // HWY_ONCE
