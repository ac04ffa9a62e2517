// Residual streams on the CPU. HcMix is the costly one (24 dot products over 4 * d values per row
// and sublayer): pairs of rows share the loads of fn, and the mean square rides along in the same
// tile shape-independent order. Sinkhorn runs on scalars.
#include "kernels/hyper_connection/hyper_connection.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/hyper_connection/hyper_connection_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
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
HWY_EXPORT(MixDots);
HWY_EXPORT(HcPostRows);
HWY_EXPORT(StreamMeanRows);

float Sigmoid(float x) {
  return 1.0f / (1.0f + std::exp(-x));
}

void DivideRows(float* k, int n, float eps) {
  for (int i = 0; i < n; ++i) {
    float sum = 0;
    for (int j = 0; j < n; ++j)
      sum += k[i * n + j];
    for (int j = 0; j < n; ++j)
      k[i * n + j] /= sum + eps;
  }
}
void DivideColumns(float* k, int n, float eps) {
  for (int j = 0; j < n; ++j) {
    float sum = 0;
    for (int i = 0; i < n; ++i)
      sum += k[i * n + j];
    for (int i = 0; i < n; ++i)
      k[i * n + j] /= sum + eps;
  }
}

// Row softmax, then Sinkhorn: columns, and (iters - 1) times rows and columns.
void Sinkhorn(float* k, int n, int iters, float eps) {
  for (int i = 0; i < n; ++i) {
    float* row = k + i * n;
    float largest = row[0];
    for (int j = 1; j < n; ++j)
      largest = std::max(largest, row[j]);
    float sum = 0;
    for (int j = 0; j < n; ++j) {
      row[j] = std::exp(row[j] - largest);
      sum += row[j];
    }
    for (int j = 0; j < n; ++j)
      row[j] = row[j] / sum + eps;
  }
  DivideColumns(k, n, eps);
  for (int round = 1; round < iters; ++round) {
    DivideRows(k, n, eps);
    DivideColumns(k, n, eps);
  }
}

void FinishMix(const HcMixParams& p, const float* m, int64_t t) {
  const int n = static_cast<int>(p.pre.cols);
  const float* base = p.base.Row<float>(0);
  const float* scale = p.scale.Row<float>(0);
  float* pre = p.pre.Row<float>(t);
  float* post = p.post.Row<float>(t);
  float* comb = p.comb.Row<float>(t);
  for (int i = 0; i < n; ++i) {
    pre[i] = Sigmoid(m[i] * scale[0] + base[i]) + p.hc_eps;
    post[i] = 2.0f * Sigmoid(m[n + i] * scale[1] + base[n + i]);
  }
  for (int i = 0; i < n * n; ++i)
    comb[i] = m[2 * n + i] * scale[2] + base[2 * n + i];
  Sinkhorn(comb, n, p.sinkhorn_iters, p.hc_eps);
}

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
  constexpr int64_t kGrain = 4;
  ParallelRows(launch, params.out.rows, kGrain, [&](int64_t begin, int64_t end, int thread_idx) {
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
  constexpr int64_t kGrain = 4;
  constexpr int64_t kRowsAtOnce = 8;
  ParallelRows(launch, params.streams.rows, kGrain, [&](int64_t begin, int64_t end, int) {
    float dots[kRowsAtOnce * (2 * kMaxStreams + kMaxStreams * kMaxStreams)];
    for (int64_t t = begin; t < end; t += kRowsAtOnce) {
      const int64_t stop = std::min(end, t + kRowsAtOnce);
      HWY_DYNAMIC_DISPATCH(MixDots)(params, t, stop, dots);
      for (int64_t r = t; r < stop; ++r)
        FinishMix(params, dots + (r - t) * params.fn.rows, r);
    }
  });
}

void HcPostCpu(const HcPostParams& params, const Launch& launch) {
  CheckStreams(params.post.cols, params.streams.cols, params.y.cols);
  CHECK_EQ(params.streams.rows, params.y.rows);
  CHECK_EQ(params.out.rows, params.y.rows);
  CHECK_EQ(params.out.cols, params.streams.cols);
  CHECK_EQ(params.comb.cols, params.post.cols * params.post.cols);
  CHECK(params.out.dtype == params.streams.dtype);
  constexpr int64_t kGrain = 4;
  ParallelRows(launch, params.y.rows, kGrain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(HcPostRows)(params, begin, end);
  });
}

void StreamMeanCpu(const StreamMeanParams& params, const Launch& launch) {
  CheckStreams(params.num_streams, params.streams.cols, params.out.cols);
  CHECK_EQ(params.streams.rows, params.out.rows);
  constexpr int64_t kGrain = 8;
  ParallelRows(launch, params.out.rows, kGrain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(StreamMeanRows)(params, begin, end);
  });
}

}  // namespace twinspark
#endif  // HWY_ONCE
