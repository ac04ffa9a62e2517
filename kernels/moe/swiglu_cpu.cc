// The expert activation on the CPU.
#include "kernels/moe/swiglu.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/moe/swiglu_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/exp-inl.h"
#include "kernels/parallel_rows.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

void SwiGluRows(const SwiGluParams& p, int64_t begin, int64_t end) {
  const DF d;
  const VF limit = hn::Set(d, p.limit), one = hn::Set(d, 1.0f);
  WithFloatType(p.gate.dtype, [&](auto* in_type) {
    WithFloatType(p.out.dtype, [&](auto* out_type) {
      using In = std::remove_pointer_t<decltype(in_type)>;
      using Out = std::remove_pointer_t<decltype(out_type)>;
      for (int64_t t = begin; t < end; ++t) {
        const In* gate = p.gate.Row<In>(t);
        const In* up = p.up.Row<In>(t);
        Out* out = p.out.Row<Out>(t);
        MapVectors<kAllWords<In, Out>>(d, p.out.cols, out, [&](const auto& load) HWY_ATTR {
          const VF g = hn::Min(load(gate), limit);
          const VF u = hn::Max(hn::Min(load(up), limit), hn::Neg(limit));
          const VF silu = hn::Div(g, hn::Add(one, ExpF32(d, hn::Neg(g))));
          return hn::Mul(silu, u);
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
HWY_EXPORT(SwiGluRows);

void SwiGluCpu(const SwiGluParams& params, const Launch& launch) {
  CHECK(params.gate.dtype == params.up.dtype);
  CHECK_EQ(params.gate.rows, params.out.rows);
  CHECK_EQ(params.up.rows, params.out.rows);
  CHECK_EQ(params.gate.cols, params.out.cols);
  CHECK_EQ(params.up.cols, params.out.cols);
  const int64_t grain = RowGrain(0.6 * static_cast<double>(params.out.cols));
  ParallelRows(launch, params.out.rows, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(SwiGluRows)(params, begin, end);
  });
}

}  // namespace twinspark
#endif  // HWY_ONCE
