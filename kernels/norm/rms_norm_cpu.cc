// RMSNorm on the CPU: one pass for the sum of squares (four accumulators of vectors, fixed order),
// one for the products.
#include "kernels/norm/rms_norm.h"

#include <algorithm>
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

// The sums of the next rows are on their way while division and root of a row, which take longer
// than its sums, wait for each other.
constexpr int64_t kRowsAtOnce = 4;

void RmsNormRows(const RmsNormParams& p, int64_t begin, int64_t end) {
  const float* weight = p.weight.Row<float>(0);
  const int64_t n = p.x.cols;
  WithFloatType(p.x.dtype, [&](auto* in_type) {
    WithFloatType(p.out.dtype, [&](auto* out_type) {
      using In = std::remove_pointer_t<decltype(in_type)>;
      using Out = std::remove_pointer_t<decltype(out_type)>;
      for (int64_t t = begin; t < end; t += kRowsAtOnce) {
        const int64_t count = std::min(kRowsAtOnce, end - t);
        float inverse_rms[kRowsAtOnce];
        for (int64_t r = 0; r < count; ++r)
          inverse_rms[r] = InverseRms(p.x.Row<In>(t + r), n, p.eps);
        for (int64_t r = 0; r < count; ++r)
          ScaleRow(p.x.Row<In>(t + r), weight, n, inverse_rms[r], p.out.Row<Out>(t + r));
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
