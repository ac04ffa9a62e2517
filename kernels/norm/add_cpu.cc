// Addition of partial results on the CPU.
#include "kernels/norm/add.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/norm/add_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/parallel_rows.h"
#include "kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

void AddRows(const AddParams& p, int64_t begin, int64_t end) {
  const DF d;
  const int64_t n = p.a.cols;
  WithFloatType(p.a.dtype, [&](auto* a_type) {
    WithFloatType(p.out.dtype, [&](auto* out_type) {
      using A = std::remove_pointer_t<decltype(a_type)>;
      using Out = std::remove_pointer_t<decltype(out_type)>;
      if (p.b.data == nullptr) {
        for (int64_t t = begin; t < end; ++t) {
          const A* a = p.a.Row<A>(t);
          MapVectors<kAllWords<A, Out>>(d, n, p.out.Row<Out>(t),
                                        [&](const auto& load) HWY_ATTR { return load(a); });
        }
        return;
      }
      WithFloatType(p.b.dtype, [&](auto* b_type) {
        using B = std::remove_pointer_t<decltype(b_type)>;
        for (int64_t t = begin; t < end; ++t) {
          const A* a = p.a.Row<A>(t);
          const B* b = p.b.Row<B>(t);
          MapVectors<kAllWords<A, B, Out>>(d, n, p.out.Row<Out>(t), [&](const auto& load) HWY_ATTR {
            return hn::Add(load(a), load(b));
          });
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
HWY_EXPORT(AddRows);

void AddCpu(const AddParams& params, const Launch& launch) {
  CHECK_EQ(params.a.rows, params.out.rows);
  CHECK_EQ(params.a.cols, params.out.cols);
  if (params.b.data != nullptr) {
    CHECK_EQ(params.b.rows, params.a.rows);
    CHECK_EQ(params.b.cols, params.a.cols);
  }
  const int64_t grain = RowGrain(0.15 * static_cast<double>(params.a.cols));
  ParallelRows(launch, params.a.rows, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(AddRows)(params, begin, end);
  });
}

}  // namespace twinspark
#endif  // HWY_ONCE
