// Engram rows and gate on the CPU.
#include "kernels/engram/engram.h"

#include <algorithm>
#include <cmath>
#include <limits>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/engram/engram_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/parallel_rows.h"
#include "kernels/quant/codec-inl.h"
#include "kernels/row_norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

constexpr int64_t kScaleGroup = 32;  // values that share a scale

// One group of any codes. kFolded: 2^8 is in the scale, where that is exact; products of codes and
// powers of two are exact, or rounded once when subnormal, either way.
template <bool kFolded, class Out>
HWY_INLINE void DequantizeAny(const uint8_t* codes, float scale, Out* out) {
  const DF d;
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(DF()));  // divides 32
  const VF factor = hn::Set(d, kFolded ? scale * 256.0f : scale);
  const VF rebias = hn::Set(d, 256.0f);
  const VF not_a_number = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
  const auto decode = [&](int64_t i) HWY_ATTR {
    const VF small = DecodeE4M3(d, codes + i);  // 2^-8 times the value; code 127 comes as 480
    const auto is_nan = hn::Eq(hn::Abs(small), hn::Set(d, 480.0f / 256.0f));
    const VF value = hn::IfThenElse(is_nan, not_a_number, small);
    return hn::Mul(kFolded ? value : hn::Mul(value, rebias), factor);
  };
  TWINSPARK_UNROLL
  for (int64_t i = 0; i < kScaleGroup; i += 2 * kLanes)
    StoreTwo<false>({decode(i), decode(i + kLanes)}, d, out + i);
}

#if HWY_TARGET != HWY_SCALAR
// Is one of the 32 codes a NaN (127 or 255)?
HWY_INLINE bool AnyNaNCode(const uint8_t* codes) {
  const hn::CappedTag<uint8_t, kScaleGroup> d8;
  const auto magnitude = hn::Set(d8, uint8_t{0x7f});
  auto found = hn::MaskFromVec(hn::Zero(d8));
  for (int64_t i = 0; i < kScaleGroup; i += static_cast<int64_t>(hn::Lanes(d8)))
    found = hn::Or(found, hn::Eq(hn::And(hn::LoadU(d8, codes + i), magnitude), magnitude));
  return !hn::AllFalse(d8, found);
}
#endif

// One group. Where no code is a NaN and no value leaves the normal numbers, values of four
// significant bits are bf16 values, so that nothing has to be looked at or rounded.
template <class Out>
HWY_INLINE void DequantizeGroup(const uint8_t* codes, uint8_t scale_byte, Out* out) {
  constexpr uint8_t kLargestFolded = 127 + 100;
  const float scale = E8M0ToF32(scale_byte);
  if (scale_byte > kLargestFolded) return DequantizeAny<false>(codes, scale, out);
#if HWY_TARGET != HWY_SCALAR
  if constexpr (std::is_same_v<Out, Bf16>) {
    constexpr uint8_t kSmallestNormal = 10;  // 2^-9 * 2^(10 - 127) is a normal number
    if (HWY_LIKELY(scale_byte >= kSmallestNormal && !AnyNaNCode(codes))) {
      const DF d;
      const hn::Repartition<uint16_t, DF> d16;
      constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(DF()));
      const VF factor = hn::Set(d, scale * 256.0f);
      const auto decode = [&](int64_t i) HWY_ATTR {
        return hn::BitCast(d16, hn::Mul(DecodeE4M3(d, codes + i), factor));
      };
      TWINSPARK_UNROLL
      for (int64_t i = 0; i < kScaleGroup; i += 2 * kLanes)
        hn::StoreU(hn::ConcatOdd(d16, decode(i + kLanes), decode(i)), d16,
                   reinterpret_cast<uint16_t*>(out + i));
      return;
    }
  }
#endif
  DequantizeAny<true>(codes, scale, out);
}

void DequantizeRows(const EngramDequantizeParams& p, int64_t begin, int64_t end) {
  const int64_t num_groups = p.scales.cols;
  WithFloatType(p.out.dtype, [&](auto* type) {
    using Out = std::remove_pointer_t<decltype(type)>;
    for (int64_t t = begin; t < end; ++t) {
      const uint8_t* codes = p.codes.Row<uint8_t>(t);
      const uint8_t* scales = p.scales.Row<uint8_t>(t);
      Out* out = p.out.Row<Out>(t);
      for (int64_t g = 0; g < num_groups; ++g)
        DequantizeGroup(codes + g * kScaleGroup, scales[g], out + g * kScaleGroup);
    }
  });
}

// The three sums of one stream in one pass: s . s and key . key in the order of SumOfSquares, and
// sum_j s[j] * w[j] * key[j], products from the left, as one chain (whose latency the other two
// hide).
struct GateSums {
  float ss, kk, skw;
};
template <class S, class K>
HWY_INLINE GateSums SumStream(const S* s, const float* w, const K* key, int64_t n) {
  const DF d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  VF ss0 = hn::Zero(d), ss1 = ss0, ss2 = ss0, ss3 = ss0;
  VF kk0 = ss0, kk1 = ss0, kk2 = ss0, kk3 = ss0, skw = ss0;
  const auto add = [&](VF sv, VF kv, VF wv, VF& ss, VF& kk) HWY_ATTR {
    ss = hn::MulAdd(sv, sv, ss);
    kk = hn::MulAdd(kv, kv, kk);
    skw = hn::MulAdd(hn::Mul(sv, wv), kv, skw);
  };
  const auto add_at = [&](int64_t i, VF& ss, VF& kk) HWY_ATTR {
    add(LoadF32(d, s + i), LoadF32(d, key + i), LoadF32(d, w + i), ss, kk);
  };
  int64_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes) {
    add_at(i, ss0, kk0);
    add_at(i + lanes, ss1, kk1);
    add_at(i + 2 * lanes, ss2, kk2);
    add_at(i + 3 * lanes, ss3, kk3);
  }
  for (; i + lanes <= n; i += lanes)
    add_at(i, ss0, kk0);
  if (i < n) {
    add(LoadTail(d, s + i, n - i), LoadTail(d, key + i, n - i), LoadTail(d, w + i, n - i), ss1,
        kk1);
  }
  const auto join = [&](VF a, VF b, VF c, VF e)
                        HWY_ATTR { return ReduceLanes(d, hn::Add(hn::Add(a, b), hn::Add(c, e))); };
  return {join(ss0, ss1, ss2, ss3), join(kk0, kk1, kk2, kk3), ReduceLanes(d, skw)};
}

// The gate of a stream from its sums.
HWY_INLINE float GateOf(const GateSums& sums, int64_t d_model, float eps, float root) {
  const float n = InverseRoot(sums.ss, d_model, eps) * InverseRoot(sums.kk, d_model, eps);
  const float z = sums.skw * n * root;
  const float signed_root = std::copysign(std::sqrt(std::max(std::abs(z), 1e-6f)), z);
  return 1.0f / (1.0f + std::exp(-signed_root));
}

// All sums first, then all gates, then all updates: roots, exponential and divisions of a gate wait
// for each other, so the work of other streams has to stand beside them.
template <class S, class K>
void GateRow(const EngramGateParams& p, int64_t t, float root) {
  constexpr int64_t kStreamsAtOnce = 8;
  const DF d;
  const int64_t d_model = p.weight.cols;
  const int64_t num_streams = p.weight.rows;
  const bool image = p.image_mask != nullptr && p.image_mask[t] != 0;
  const S* streams = p.streams.Row<S>(t);
  const K* kv = p.kv.Row<K>(t);
  const K* value = kv + num_streams * d_model;
  S* out = p.out.Row<S>(t);
  for (int64_t first = 0; first < num_streams; first += kStreamsAtOnce) {
    const int64_t count = std::min(kStreamsAtOnce, num_streams - first);
    GateSums sums[kStreamsAtOnce];
    float gates[kStreamsAtOnce];
    for (int64_t c = 0; c < count; ++c) {
      const int64_t at = (first + c) * d_model;
      sums[c] = SumStream(streams + at, p.weight.Row<float>(first + c), kv + at, d_model);
    }
    for (int64_t c = 0; c < count; ++c)
      gates[c] = image ? 0.0f : GateOf(sums[c], d_model, p.eps, root);
    for (int64_t c = 0; c < count; ++c) {
      if (p.gate.data != nullptr) p.gate.Row<float>(t)[first + c] = gates[c];
      const VF gate = hn::Set(d, gates[c]);
      const S* s = streams + (first + c) * d_model;
      MapVectors<kAllWords<S, K>>(d, d_model, out + (first + c) * d_model,
                                  [&](const auto& load)
                                      HWY_ATTR { return hn::MulAdd(gate, load(value), load(s)); });
    }
  }
}

void GateRows(const EngramGateParams& p, int64_t begin, int64_t end) {
  const float root = 1.0f / std::sqrt(static_cast<float>(p.weight.cols));
  WithFloatType(p.streams.dtype, [&](auto* s_type) {
    WithFloatType(p.kv.dtype, [&](auto* kv_type) {
      using S = std::remove_pointer_t<decltype(s_type)>;
      using K = std::remove_pointer_t<decltype(kv_type)>;
      for (int64_t t = begin; t < end; ++t)
        GateRow<S, K>(p, t, root);
    });
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
HWY_EXPORT(DequantizeRows);
HWY_EXPORT(GateRows);

void EngramDequantizeCpu(const EngramDequantizeParams& params, const Launch& launch) {
  constexpr int64_t kGroup = 32;
  CHECK_EQ(params.codes.cols, params.out.cols);
  CHECK_EQ(params.codes.rows, params.out.rows);
  CHECK_EQ(params.scales.cols * kGroup, params.codes.cols);
  CHECK(params.codes.dtype == DType::kF8E4M3) << DTypeName(params.codes.dtype);
  CHECK(params.scales.dtype == DType::kF8E8M0) << DTypeName(params.scales.dtype);
  const int64_t grain = RowGrain(0.15 * static_cast<double>(params.out.cols));
  ParallelRows(launch, params.out.rows, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(DequantizeRows)(params, begin, end);
  });
}

void EngramGateCpu(const EngramGateParams& params, const Launch& launch) {
  const int64_t num_streams = params.weight.rows;
  CHECK_EQ(params.streams.cols, num_streams * params.weight.cols);
  CHECK_EQ(params.kv.cols, (num_streams + 1) * params.weight.cols);
  CHECK_EQ(params.kv.rows, params.streams.rows);
  CHECK_EQ(params.out.rows, params.streams.rows);
  CHECK_EQ(params.out.cols, params.streams.cols);
  CHECK(params.out.dtype == params.streams.dtype);
  CHECK(params.weight.dtype == DType::kF32);
  const int64_t grain = RowGrain(0.4 * static_cast<double>(params.streams.cols));
  ParallelRows(launch, params.streams.rows, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(GateRows)(params, begin, end);
  });
}

}  // namespace twinspark
#endif  // HWY_ONCE
