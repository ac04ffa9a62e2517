// Engram rows and gate on the CPU.
#include "kernels/engram/engram.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/engram/engram_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/parallel_rows.h"
#include "kernels/row_norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

// sum_j s[j] * w[j] * key[j], products from the left.
template <class S, class K>
float TripleDot(const S* s, const float* w, const K* key, int64_t n) {
  const DF d;
  VF sum = hn::Zero(d);
  ForVectors(d, n, [&](const auto& load, const auto&) HWY_ATTR {
    sum = hn::MulAdd(hn::Mul(load(s), load(w)), load(key), sum);
  });
  return ReduceLanes(d, sum);
}

template <class S, class K>
void GateRow(const EngramGateParams& p, int64_t t) {
  const DF d;
  const int64_t d_model = p.weight.cols;
  const int64_t num_streams = p.weight.rows;
  const bool image = p.image_mask != nullptr && p.image_mask[t] != 0;
  const S* streams = p.streams.Row<S>(t);
  const K* kv = p.kv.Row<K>(t);
  const K* value = kv + num_streams * d_model;
  const float root = 1.0f / std::sqrt(static_cast<float>(d_model));
  for (int64_t c = 0; c < num_streams; ++c) {
    const S* s = streams + c * d_model;
    const K* key = kv + c * d_model;
    S* out = p.out.Row<S>(t) + c * d_model;
    const float n = InverseRms(s, d_model, p.eps) * InverseRms(key, d_model, p.eps);
    const float z = TripleDot(s, p.weight.Row<float>(c), key, d_model) * n * root;
    const float signed_root = std::copysign(std::sqrt(std::max(std::abs(z), 1e-6f)), z);
    const float g = image ? 0.0f : 1.0f / (1.0f + std::exp(-signed_root));
    if (p.gate.data != nullptr) p.gate.Row<float>(t)[c] = g;
    const VF gate = hn::Set(d, g);
    ForVectors(d, d_model, [&](const auto& load, const auto& store) HWY_ATTR {
      store(hn::MulAdd(gate, load(value), load(s)), out);
    });
  }
}

void GateRows(const EngramGateParams& p, int64_t begin, int64_t end) {
  WithFloatType(p.streams.dtype, [&](auto* s_type) {
    WithFloatType(p.kv.dtype, [&](auto* kv_type) {
      using S = std::remove_pointer_t<decltype(s_type)>;
      using K = std::remove_pointer_t<decltype(kv_type)>;
      for (int64_t t = begin; t < end; ++t)
        GateRow<S, K>(p, t);
    });
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
HWY_EXPORT(GateRows);

void EngramDequantizeCpu(const EngramDequantizeParams& params, const Launch& launch) {
  constexpr int64_t kGroup = 32;
  CHECK_EQ(params.codes.cols, params.out.cols);
  CHECK_EQ(params.codes.rows, params.out.rows);
  CHECK_EQ(params.scales.cols * kGroup, params.codes.cols);
  CHECK(params.codes.dtype == DType::kF8E4M3) << DTypeName(params.codes.dtype);
  CHECK(params.scales.dtype == DType::kF8E8M0) << DTypeName(params.scales.dtype);
  float values[256];
  for (int code = 0; code < 256; ++code)
    values[code] = E4M3ToF32(static_cast<uint8_t>(code));
  const int64_t grain = RowGrain(1.0 * static_cast<double>(params.out.cols));
  WithFloatType(params.out.dtype, [&](auto* type) {
    using Out = std::remove_pointer_t<decltype(type)>;
    ParallelRows(launch, params.out.rows, grain, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = begin; t < end; ++t) {
        const uint8_t* codes = params.codes.Row<uint8_t>(t);
        const uint8_t* scales = params.scales.Row<uint8_t>(t);
        Out* out = params.out.Row<Out>(t);
        for (int64_t i = 0; i < params.out.cols; ++i) {
          const float value = values[codes[i]] * E8M0ToF32(scales[i / kGroup]);
          if constexpr (std::is_same_v<Out, Bf16>) {
            out[i] = ToBf16(value);
          } else {
            out[i] = value;
          }
        }
      }
    });
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
