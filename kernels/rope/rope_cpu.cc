// Rotary positions on the CPU. The table is scalar (f32 product, then cosf and sinf of the C
// library); the rotation of interleaved pairs works on pairs of vectors.
#include "kernels/rope/rope.h"

#include <cmath>
#include <cstring>
#include <numbers>

#ifndef TWINSPARK_KERNELS_ROPE_LIMITS_
#define TWINSPARK_KERNELS_ROPE_LIMITS_
namespace twinspark {
namespace {
constexpr int64_t kMostPairs = 512;  // of a head
}
}  // namespace twinspark
#endif  // TWINSPARK_KERNELS_ROPE_LIMITS_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/rope/rope_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/parallel_rows.h"
#include "kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

// (u, v) -> (u cos - v sin, u sin + v cos) for interleaved pairs, from pair i on; `sines` have
// their sign. The products are rounded before the sum, on every target and in the tail alike.
template <class In, class Out>
void RotatePairs(
    const In* in, const float* cosines, const float* sines, int64_t i, int64_t pairs, Out* out) {
  for (; i < pairs; ++i) {
    const float u = ToF32(in[2 * i]), v = ToF32(in[2 * i + 1]);
    const float c = cosines[i], s = sines[i];
    const float x = u * c - v * s;
    const float y = u * s + v * c;
    if constexpr (std::is_same_v<Out, Bf16>) {
      out[2 * i] = ToBf16(x);
      out[2 * i + 1] = ToBf16(y);
    } else {
      out[2 * i] = x;
      out[2 * i + 1] = y;
    }
  }
}

// kPairs: their number where it is known, else 0.
template <int kPairs, class In, class Out>
HWY_INLINE void RotateHead(
    const In* in, const float* cosines, const float* sines, int64_t num_pairs, Out* out) {
  const int64_t pairs = kPairs == 0 ? num_pairs : kPairs;
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const DF d;
  constexpr int64_t lanes = static_cast<int64_t>(hn::MaxLanes(d));
  constexpr bool kWords = kAllWords<In, Out>;  // the two values of a pair are the two of a word
  TWINSPARK_UNROLL
  for (; i + lanes <= pairs; i += lanes) {
    const Two in_two = LoadTwo<kWords>(d, in + 2 * i);
    VF u = in_two.a, v = in_two.b;
    if constexpr (!kWords) {
      u = hn::ConcatEven(d, in_two.b, in_two.a);
      v = hn::ConcatOdd(d, in_two.b, in_two.a);
    }
    const VF c = hn::LoadU(d, cosines + i), s = hn::LoadU(d, sines + i);
    const VF x = hn::Sub(hn::Mul(u, c), hn::Mul(v, s));
    const VF y = hn::Add(hn::Mul(u, s), hn::Mul(v, c));
    if constexpr (kWords) {
      StoreTwo<true>({x, y}, d, out + 2 * i);
    } else {
      HWY_ALIGN float pair[2 * hn::MaxLanes(DF())];
      hn::StoreInterleaved2(x, y, d, pair);
      StoreTwo<false>({hn::Load(d, pair), hn::Load(d, pair + lanes)}, d, out + 2 * i);
    }
  }
#endif
  if (i < pairs) RotatePairs(in, cosines, sines, i, pairs, out);
}

template <class In, class Out>
HWY_INLINE void CopyValues(const In* in, int64_t n, Out* out) {
  if constexpr (std::is_same_v<In, Out>) {
    if (in != out) std::memmove(out, in, static_cast<size_t>(n) * sizeof(Out));
  } else {
    MapVectors<false>(DF(), n, out, [&](const auto& load) HWY_ATTR { return load(in); });
  }
}

constexpr int kUsualPairs = 32;
constexpr int64_t kHeadsAhead = 6;

void RopeRows(const RopeParams& p, int64_t begin, int64_t end) {
  const int64_t plain = p.head_dim - p.rope_dim;
  const int64_t pairs = p.rope_dim / 2;
  const int64_t num_heads = p.x.cols / p.head_dim;
  const bool inverse = p.inverse;
  HWY_ALIGN float negated[kMostPairs];  // sines of the inverse, once for all heads of a row
  WithFloatType(p.x.dtype, [&](auto* in_type) {
    WithFloatType(p.out.dtype, [&](auto* out_type) {
      using In = std::remove_pointer_t<decltype(in_type)>;
      using Out = std::remove_pointer_t<decltype(out_type)>;
      for (int64_t t = begin; t < end; ++t) {
        const float* cosines = p.table.Row<float>(t);
        const float* sines = cosines + pairs;
        if (inverse) {
          for (int64_t i = 0; i < pairs; ++i)
            negated[i] = -sines[i];
          sines = negated;
        }
        const In* in = p.x.Row<In>(t);
        Out* out = p.out.Row<Out>(t);
        for (int64_t h = 0; h < num_heads; ++h, in += p.head_dim, out += p.head_dim) {
          CopyValues(in, plain, out);
          // Heads lie too far apart for the hardware to see what comes next.
          __builtin_prefetch(in + plain + kHeadsAhead * p.head_dim, 1, 2);
          __builtin_prefetch(in + plain + kHeadsAhead * p.head_dim + pairs, 1, 2);
          if (pairs == kUsualPairs) {
            RotateHead<kUsualPairs>(in + plain, cosines, sines, pairs, out + plain);
          } else {
            RotateHead<0>(in + plain, cosines, sines, pairs, out + plain);
          }
        }
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
HWY_EXPORT(RopeRows);

std::vector<float> PlainRopeFrequencies(int rope_dim, float theta) {
  std::vector<float> frequencies;
  for (int i = 0; i < rope_dim / 2; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(rope_dim);
    frequencies.push_back(1.0f / std::pow(theta, exponent));
  }
  return frequencies;
}

std::vector<float> YarnRopeFrequencies(const YarnParams& params) {
  std::vector<float> frequencies = PlainRopeFrequencies(params.rope_dim, params.theta);
  if (params.factor <= 1.0f) return frequencies;
  // Pair index at which a wave makes `turns` rotations within the original context.
  const auto pair_of = [&](float turns) {
    return params.rope_dim *
           std::log(params.original_max_position / (2.0 * std::numbers::pi * turns)) /
           (2.0 * std::log(static_cast<double>(params.theta)));
  };
  const double low = std::max(std::floor(pair_of(params.beta_fast)), 0.0);
  const double high = std::min(std::ceil(pair_of(params.beta_slow)), params.rope_dim - 1.0);
  const float width = static_cast<float>(std::max(high - low, 0.001));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float ramp =
        std::clamp((static_cast<float>(i) - static_cast<float>(low)) / width, 0.0f, 1.0f);
    frequencies[i] = frequencies[i] / params.factor * ramp + frequencies[i] * (1.0f - ramp);
  }
  return frequencies;
}

void RopeTableCpu(const RopeTableParams& params, const Launch& launch) {
  CHECK(params.out.dtype == DType::kF32);
  CHECK_EQ(params.out.cols % 2, 0);
  const int64_t pairs = params.out.cols / 2;
  const int64_t grain = RowGrain(10.0 * static_cast<double>(params.out.cols));
  ParallelRows(launch, params.out.rows, grain, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      float* out = params.out.Row<float>(t);
      const float position = static_cast<float>(params.positions[t]);
      for (int64_t i = 0; i < pairs; ++i) {
        const float angle = position * params.frequencies[i];
        out[i] = std::cos(angle);
        out[pairs + i] = std::sin(angle);
      }
    }
  });
}

void RopeCpu(const RopeParams& params, const Launch& launch) {
  CHECK(params.head_dim > 0 && params.rope_dim <= params.head_dim) << params.rope_dim;
  CHECK_EQ(params.rope_dim % 2, 0);
  CHECK_LE(params.rope_dim, 2 * kMostPairs);
  CHECK_EQ(params.x.cols % params.head_dim, 0);
  CHECK_EQ(params.x.cols, params.out.cols);
  CHECK_EQ(params.x.rows, params.out.rows);
  CHECK_EQ(params.table.rows, params.x.rows);
  CHECK_EQ(params.table.cols, params.rope_dim);
  const int64_t grain = RowGrain(0.2 * static_cast<double>(params.x.cols));
  ParallelRows(launch, params.x.rows, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(RopeRows)(params, begin, end);
  });
}

}  // namespace twinspark
#endif  // HWY_ONCE
