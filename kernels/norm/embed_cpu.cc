// Embedding gather on the CPU: a row is read once and stored to every stream, converted when the
// activation type differs.
#include "kernels/norm/embed.h"

#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/norm/embed_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/parallel_rows.h"
#include "kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

// d values to num_copies places, d apart. Values that keep their type keep their bits.
template <class T>
void CopyRow(const T* HWY_RESTRICT in, int64_t d, int num_copies, T* HWY_RESTRICT out) {
  const hn::ScalableTag<uint8_t> d8;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d8));
  const int64_t bytes = d * static_cast<int64_t>(sizeof(T));
  const auto* from = reinterpret_cast<const uint8_t*>(in);
  auto* to = reinterpret_cast<uint8_t*>(out);
  constexpr int64_t kLongRow = 4096;  // the C library writes long runs faster, one after the other
  if (bytes > kLongRow) {
    for (int c = 0; c < num_copies; ++c)
      std::memcpy(to + c * bytes, from, static_cast<size_t>(bytes));
    return;
  }
  int64_t i = 0;
  for (; i + lanes <= bytes; i += lanes) {
    const auto values = hn::LoadU(d8, from + i);
    for (int c = 0; c < num_copies; ++c)
      hn::StoreU(values, d8, to + c * bytes + i);
  }
  for (; i < bytes; ++i) {
    for (int c = 0; c < num_copies; ++c)
      to[c * bytes + i] = from[i];
  }
}
template <class In, class Out>
void CopyRow(const In* in, int64_t d, int num_copies, Out* out) {
  ForVectors(DF(), d, [&](const auto& load, const auto& store) HWY_ATTR {
    const VF values = load(in);
    for (int c = 0; c < num_copies; ++c)
      store(values, out + c * d);
  });
}

void EmbedRows(const EmbedParams& p, int64_t begin, int64_t end) {
  const int64_t d = p.table.cols;
  WithFloatType(p.table.dtype, [&](auto* in_type) {
    WithFloatType(p.out.dtype, [&](auto* out_type) {
      using In = std::remove_pointer_t<decltype(in_type)>;
      using Out = std::remove_pointer_t<decltype(out_type)>;
      for (int64_t t = begin; t < end; ++t) {
        const int64_t row = p.ids[t] - p.first_id;
        Out* out = p.out.Row<Out>(t);
        if (row < 0 || row >= p.table.rows) {
          std::fill(out, out + p.num_copies * d, Out{});
        } else {
          CopyRow(p.table.Row<In>(row), d, p.num_copies, out);
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
HWY_EXPORT(EmbedRows);

void EmbedCpu(const EmbedParams& params, const Launch& launch) {
  CHECK_EQ(params.out.cols, params.num_copies * params.table.cols);
  const int64_t grain = RowGrain(0.1 * static_cast<double>(params.out.cols));
  ParallelRows(launch, params.out.rows, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(EmbedRows)(params, begin, end);
  });
}

}  // namespace twinspark
#endif  // HWY_ONCE
