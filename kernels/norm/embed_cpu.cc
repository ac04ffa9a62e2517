// Embedding gather on the CPU: copies of rows, converted when the activation type differs.
#include "kernels/norm/embed.h"

#include <algorithm>
#include <cstring>

#include "kernels/parallel_rows.h"

namespace twinspark {
namespace {

float Convert(float x, float*) {
  return x;
}
Bf16 Convert(float x, Bf16*) {
  return ToBf16(x);
}

template <class In, class Out>
void EmbedRow(const EmbedParams& p, int64_t t) {
  const int64_t d = p.table.cols;
  const int64_t row = p.ids[t] - p.first_id;
  Out* out = p.out.Row<Out>(t);
  if (row < 0 || row >= p.table.rows) {
    std::fill(out, out + p.num_copies * d, Out{});
    return;
  }
  const In* in = p.table.Row<In>(row);
  if constexpr (std::is_same_v<In, Out>) {
    std::memcpy(out, in, static_cast<size_t>(d) * sizeof(Out));
  } else {
    for (int64_t j = 0; j < d; ++j)
      out[j] = Convert(ToF32(in[j]), static_cast<Out*>(nullptr));
  }
  for (int c = 1; c < p.num_copies; ++c) {
    std::memcpy(out + c * d, out, static_cast<size_t>(d) * sizeof(Out));
  }
}

}  // namespace

void EmbedCpu(const EmbedParams& params, const Launch& launch) {
  CHECK_EQ(params.out.cols, params.num_copies * params.table.cols);
  const int64_t grain = RowGrain(0.1 * static_cast<double>(params.out.cols));
  WithFloatType(params.table.dtype, [&](auto* in_type) {
    WithFloatType(params.out.dtype, [&](auto* out_type) {
      using In = std::remove_pointer_t<decltype(in_type)>;
      using Out = std::remove_pointer_t<decltype(out_type)>;
      ParallelRows(launch, params.out.rows, grain, [&](int64_t begin, int64_t end, int) {
        for (int64_t t = begin; t < end; ++t)
          EmbedRow<In, Out>(params, t);
      });
    });
  });
}

}  // namespace twinspark
