// Store, load, copy and simulation of the cache formats on the CPU.
#include "kernels/quant/quantize_rows.h"

#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/quant/quantize_rows_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/parallel_rows.h"
#include "kernels/quant/codec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

// Rows of at least so many groups are worth waiting for others that share the vectors of scales.
constexpr int64_t kFewGroups = 4;

void StoreRowsRange(const StoreRowsParams& p, int64_t begin, int64_t end) {
  const int64_t row_bytes = p.dst.row_bytes();
  uint8_t* base = static_cast<uint8_t*>(p.dst.data);
  WithFloatType(p.x.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const int64_t num_groups =
        p.dst.format == CacheFormat::kF32 ? 0 : p.x.cols / CacheGroup(p.dst.format);
    const int64_t together = num_groups >= kFewGroups && kScalesAtOnce % num_groups == 0
                                 ? kScalesAtOnce / num_groups
                                 : 1;
    const T* from[kScalesAtOnce / kFewGroups];
    uint8_t* to[kScalesAtOnce / kFewGroups];
    int64_t waiting = 0;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = p.index != nullptr ? p.index[t] : t;
      if (row < 0) continue;
      CHECK_LT(row, p.dst.num_rows);
      from[waiting] = p.x.Row<T>(t);
      to[waiting++] = base + row * row_bytes;
      if (waiting < together) continue;
      waiting = 0;
      if (together > 1) {
        EncodeShortRows(p.dst.format, from, together, p.x.cols, to);
      } else {
        EncodeRow(p.dst.format, from[0], p.x.cols, to[0]);
      }
    }
    for (int64_t i = 0; i < waiting; ++i)
      EncodeRow(p.dst.format, from[i], p.x.cols, to[i]);
  });
}

void LoadRowsRange(const LoadRowsParams& p, int64_t begin, int64_t end) {
  const int64_t row_bytes = p.src.row_bytes();
  const uint8_t* base = static_cast<const uint8_t*>(p.src.data);
  WithFloatType(p.out.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    for (int64_t t = begin; t < end; ++t) {
      const int64_t row = p.index != nullptr ? p.index[t] : t;
      CHECK(row >= 0 && row < p.src.num_rows) << row << " of " << p.src.num_rows;
      DecodeRow(p.src.format, base + row * row_bytes, p.out.cols, p.out.Row<T>(t));
    }
  });
}

void QuantizeValuesRange(const QuantizeValuesParams& p,
                         uint8_t* packed,
                         int64_t begin,
                         int64_t end) {
  WithFloatType(p.x.dtype, [&](auto* in_type) {
    WithFloatType(p.out.dtype, [&](auto* out_type) {
      using In = std::remove_pointer_t<decltype(in_type)>;
      using Out = std::remove_pointer_t<decltype(out_type)>;
      for (int64_t t = begin; t < end; ++t) {
        EncodeRow(p.format, p.x.Row<In>(t), p.x.cols, packed);
        DecodeRow(p.format, packed, p.x.cols, p.out.Row<Out>(t));
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
HWY_EXPORT(StoreRowsRange);
HWY_EXPORT(LoadRowsRange);
HWY_EXPORT(QuantizeValuesRange);

void StoreRowsCpu(const StoreRowsParams& params, const Launch& launch) {
  CHECK_EQ(params.x.cols, params.dst.cols);
  const int64_t grain = RowGrain(1.5 * static_cast<double>(params.x.cols));
  ParallelRows(launch, params.x.rows, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(StoreRowsRange)(params, begin, end);
  });
}

void LoadRowsCpu(const LoadRowsParams& params, const Launch& launch) {
  CHECK_EQ(params.out.cols, params.src.cols);
  const int64_t grain = RowGrain(0.3 * static_cast<double>(params.out.cols));
  ParallelRows(launch, params.out.rows, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(LoadRowsRange)(params, begin, end);
  });
}

void CopyRowsCpu(const CopyRowsParams& params, const Launch&) {
  CHECK(params.src.format == params.dst.format) << CacheFormatName(params.src.format);
  CHECK_EQ(params.src.cols, params.dst.cols);
  const int64_t row_bytes = params.src.row_bytes();
  const uint8_t* src = static_cast<const uint8_t*>(params.src.data);
  uint8_t* dst = static_cast<uint8_t*>(params.dst.data);
  for (int64_t t = 0; t < params.num_rows; ++t) {
    const int64_t from = params.src_index != nullptr ? params.src_index[t] : t;
    const int64_t to = params.dst_index != nullptr ? params.dst_index[t] : t;
    if (to < 0) continue;
    CHECK(from >= 0 && from < params.src.num_rows) << from << " of " << params.src.num_rows;
    CHECK_LT(to, params.dst.num_rows);
    std::memcpy(dst + to * row_bytes, src + from * row_bytes, static_cast<size_t>(row_bytes));
  }
}

void QuantizeValuesCpu(const QuantizeValuesParams& params, const Launch& launch) {
  CHECK_EQ(params.x.rows, params.out.rows);
  CHECK_EQ(params.x.cols, params.out.cols);
  const Arena::Scope scope(*launch.arena);
  const int64_t row_bytes = CacheRowBytes(params.format, params.x.cols);
  uint8_t* packed = launch.arena->Take<uint8_t>(row_bytes * NumThreads(launch));
  const int64_t grain = RowGrain(1.8 * static_cast<double>(params.x.cols));
  ParallelRows(launch, params.x.rows, grain, [&](int64_t begin, int64_t end, int thread_idx) {
    HWY_DYNAMIC_DISPATCH(QuantizeValuesRange)(params, packed + thread_idx * row_bytes, begin, end);
  });
}

}  // namespace twinspark
#endif  // HWY_ONCE
