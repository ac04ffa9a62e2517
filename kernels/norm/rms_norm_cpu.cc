// RMSNorm on the CPU: one pass for the sum of squares (four accumulators of vectors, fixed order),
// one for the products.
#include "kernels/norm/rms_norm.h"

#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/norm/rms_norm_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/parallel_rows.h"
#include "kernels/row_norm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

void RmsNormRows(const RmsNormParams& p, int64_t begin, int64_t end) {
  const float* weight = p.weight.Row<float>(0);
  WithFloatType(p.x.dtype, [&](auto* in_type) {
    WithFloatType(p.out.dtype, [&](auto* out_type) {
      using In = std::remove_pointer_t<decltype(in_type)>;
      using Out = std::remove_pointer_t<decltype(out_type)>;
      for (int64_t t = begin; t < end; ++t) {
        NormRow(p.x.Row<In>(t), weight, p.x.cols, p.eps, p.out.Row<Out>(t));
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
HWY_EXPORT(RmsNormRows);

void RmsNormCpu(const RmsNormParams& params, const Launch& launch) {
  CHECK_EQ(params.x.rows, params.out.rows);
  CHECK_EQ(params.x.cols, params.out.cols);
  CHECK_EQ(params.weight.cols, params.x.cols);
  CHECK(params.weight.dtype == DType::kF32);
  const int64_t grain = RowGrain(0.2 * static_cast<double>(params.x.cols));
  ParallelRows(launch, params.x.rows, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(RmsNormRows)(params, begin, end);
  });
}

}  // namespace twinspark
#endif  // HWY_ONCE
