// Residual streams on the CPU. HcMix is the costly one (24 dot products over 4 * d values per row
// and sublayer): rows share the loads of fn. Sigmoids and Sinkhorn run with one row per lane; a
// division by a sum is a multiplication by its reciprocal.
#include "kernels/hyper_connection/hyper_connection.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/hyper_connection/hyper_connection_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/dot-inl.h"
#include "kernels/hyper_connection/finish_mixes-inl.h"
#include "kernels/parallel_rows.h"
#include "kernels/row_norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

// Calls fn(std::integral_constant<int, n>) with the number of streams that is worth code of its
// own, so that what it keeps per stream stays in registers; with 0 for any other.
template <class Fn>
HWY_INLINE void WithStreams(int num_streams, const Fn& fn) {
  if (num_streams == 4) return fn(std::integral_constant<int, 4>());
  fn(std::integral_constant<int, 0>());
}

template <int kStreams, class T>
void CollapseRow(const T* streams, const float* pre, int64_t d_model, int num_streams, T* out) {
  const DF d;
  const int n = kStreams == 0 ? num_streams : kStreams;
  VF factor[kStreams == 0 ? kMaxStreams : kStreams];
  factor[0] = hn::Set(d, pre[0]);
  TWINSPARK_UNROLL
  for (int c = 1; c < n; ++c)
    factor[c] = hn::Set(d, pre[c]);
  MapVectors<kAllWords<T>>(d, d_model, out, [&](const auto& load) HWY_ATTR {
    VF sum = hn::Mul(factor[0], load(streams));
    TWINSPARK_UNROLL
    for (int c = 1; c < n; ++c)
      sum = hn::MulAdd(factor[c], load(streams + c * d_model), sum);
    return sum;
  });
}

// Two rows at a time where they fit: the sums of one hide the division and root of the other.
void CollapseNormRows(const CollapseNormParams& p, char* scratch, int64_t begin, int64_t end) {
  constexpr int64_t kMostRows = 2;
  const float* weight = p.weight.Row<float>(0);
  const int num_streams = static_cast<int>(p.pre.cols);
  const int64_t d_model = p.out.cols;
  WithFloatType(p.streams.dtype, [&](auto* in_type) {
    WithFloatType(p.out.dtype, [&](auto* out_type) {
      WithStreams(num_streams, [&](auto streams) {
        using In = std::remove_pointer_t<decltype(in_type)>;
        using Out = std::remove_pointer_t<decltype(out_type)>;
        const bool wanted = p.collapsed.data != nullptr;
        const int64_t rows = wanted || std::is_same_v<In, Bf16> ? kMostRows : 1;  // in scratch
        for (int64_t t = begin; t < end; t += rows) {
          const int64_t count = std::min(rows, end - t);
          In* collapsed[kMostRows];
          float inverse_rms[kMostRows];
          for (int64_t r = 0; r < count; ++r) {
            collapsed[r] =
                wanted ? p.collapsed.Row<In>(t + r) : reinterpret_cast<In*>(scratch) + r * d_model;
            CollapseRow<decltype(streams)::value>(p.streams.Row<In>(t + r), p.pre.Row<float>(t + r),
                                                  d_model, num_streams, collapsed[r]);
            inverse_rms[r] = InverseRms(collapsed[r], d_model, p.eps);
          }
          for (int64_t r = 0; r < count; ++r)
            ScaleRow(collapsed[r], weight, d_model, inverse_rms[r], p.out.Row<Out>(t + r));
        }
      });
    });
  });
}

constexpr int64_t kRowsAtOnce = int64_t{2} * kDotRows;
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

void HcMixRows(const HcMixParams& p, int64_t begin, int64_t end) {
  float dots[kRowsAtOnce * (2 * kMaxStreams + kMaxStreams * kMaxStreams)];
  const hn::CappedTag<float, 4> few;
  const hn::CappedTag<float, kMostLanes> many;
  for (int64_t t = begin; t < end; t += kRowsAtOnce) {
    const int64_t stop = std::min(end, t + kRowsAtOnce);
    MixDots(p, t, stop, dots);
#if HWY_TARGET != HWY_SCALAR
    if (p.pre.cols == kFewStreams && stop - t <= kFewRows) {
      FinishFewRows(p, dots, t, stop);
      continue;
    }
#endif
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

// Streams are in registers while all four outputs of a place are computed, so out may be streams.
template <int kStreams, class Y, class S>
void PostRow(const Y* y,
             const S* streams,
             const float* post,
             const float* comb,
             int64_t d_model,
             int num_streams,
             S* out) {
  const DF d;
  constexpr bool kWords = kAllWords<Y, S>;
  constexpr int kMost = kStreams == 0 ? kMaxStreams : kStreams;
  const int n = kStreams == 0 ? num_streams : kStreams;
  const int64_t step = 2 * static_cast<int64_t>(hn::Lanes(d));
  int64_t begin = 0;
  for (; begin + step <= d_model; begin += step) {
    Two in[kMost];
    TWINSPARK_UNROLL
    for (int i = 0; i < n; ++i)
      in[i] = LoadTwo<kWords>(d, streams + i * d_model + begin);
    const Two yv = LoadTwo<kWords>(d, y + begin);
    TWINSPARK_UNROLL
    for (int j = 0; j < n; ++j) {
      const VF of_y = hn::Set(d, post[j]);
      Two sum = {hn::Mul(of_y, yv.a), hn::Mul(of_y, yv.b)};
      TWINSPARK_UNROLL
      for (int i = 0; i < n; ++i) {
        const VF factor = InRegister(hn::Set(d, comb[i * n + j]));
        sum = {hn::MulAdd(factor, in[i].a, sum.a), hn::MulAdd(factor, in[i].b, sum.b)};
      }
      StoreTwo<kWords>(sum, d, out + j * d_model + begin);
    }
  }
  ForVectors(d, d_model - begin, [&](const auto& load, const auto& store) HWY_ATTR {
    VF in[kMost];
    for (int i = 0; i < n; ++i)
      in[i] = load(streams + i * d_model + begin);
    const VF yv = load(y + begin);
    for (int j = 0; j < n; ++j) {
      VF sum = hn::Mul(hn::Set(d, post[j]), yv);
      for (int i = 0; i < n; ++i)
        sum = hn::MulAdd(hn::Set(d, comb[i * n + j]), in[i], sum);
      store(sum, out + j * d_model + begin);
    }
  });
}

void HcPostRows(const HcPostParams& p, int64_t begin, int64_t end) {
  const int num_streams = static_cast<int>(p.post.cols);
  WithFloatType(p.y.dtype, [&](auto* y_type) {
    WithFloatType(p.streams.dtype, [&](auto* s_type) {
      using Y = std::remove_pointer_t<decltype(y_type)>;
      using S = std::remove_pointer_t<decltype(s_type)>;
      WithStreams(num_streams, [&](auto streams) {
        for (int64_t t = begin; t < end; ++t) {
          PostRow<decltype(streams)::value>(p.y.Row<Y>(t), p.streams.Row<S>(t),
                                            p.post.Row<float>(t), p.comb.Row<float>(t), p.y.cols,
                                            num_streams, p.out.Row<S>(t));
        }
      });
    });
  });
}

template <int kStreams, class In, class Out>
void MeanRow(const In* in, int64_t d_model, int num_streams, Out* out) {
  const DF d;
  const int n = kStreams == 0 ? num_streams : kStreams;
  const VF inverse = hn::Set(d, 1.0f / static_cast<float>(n));
  MapVectors<kAllWords<In, Out>>(d, d_model, out, [&](const auto& load) HWY_ATTR {
    VF sum = load(in);
    TWINSPARK_UNROLL
    for (int c = 1; c < n; ++c)
      sum = hn::Add(sum, load(in + c * d_model));
    return hn::Mul(sum, inverse);
  });
}

void StreamMeanRows(const StreamMeanParams& p, int64_t begin, int64_t end) {
  WithFloatType(p.streams.dtype, [&](auto* in_type) {
    WithFloatType(p.out.dtype, [&](auto* out_type) {
      WithStreams(p.num_streams, [&](auto streams) {
        using In = std::remove_pointer_t<decltype(in_type)>;
        using Out = std::remove_pointer_t<decltype(out_type)>;
        for (int64_t t = begin; t < end; ++t) {
          MeanRow<decltype(streams)::value>(p.streams.Row<In>(t), p.out.cols, p.num_streams,
                                            p.out.Row<Out>(t));
        }
      });
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
