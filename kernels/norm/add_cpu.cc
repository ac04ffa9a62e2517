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

template <class A, class B, class Out>
void AddRow(const A* a, const B* b, int64_t n, Out* out) {
  const DF d;
  ForVectors(d, n, [&](const auto& load, const auto& store) HWY_ATTR {
    store(b == nullptr ? load(a) : hn::Add(load(a), load(b)), out);
  });
}

void AddRows(const AddParams& p, int64_t begin, int64_t end) {
  const bool has_b = p.b.data != nullptr;
  WithFloatType(p.a.dtype, [&](auto* a_type) {
    WithFloatType(has_b ? p.b.dtype : DType::kF32, [&](auto* b_type) {
      WithFloatType(p.out.dtype, [&](auto* out_type) {
        using A = std::remove_pointer_t<decltype(a_type)>;
        using B = std::remove_pointer_t<decltype(b_type)>;
        using Out = std::remove_pointer_t<decltype(out_type)>;
        for (int64_t t = begin; t < end; ++t) {
          const B* b = has_b ? p.b.Row<B>(t) : nullptr;
          AddRow(p.a.Row<A>(t), b, p.a.cols, p.out.Row<Out>(t));
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
