// Writing, reading and simulating the cache quantisers Q8/32, Q4e8/32 and Q4e4/16 (model
// specification 3.0). Called when a layer stores window latents, compressed rows and index keys,
// and (values only) for index queries. Exact: the same bits on every SIMD target and backend. A NaN
// or an infinity in x becomes is unspecified (e2m1 has neither); such rows are caught
// by the non-finite check on the logits, which see the same residual streams.
#pragma once

#include <cstdint>

#include "kernels/launch.h"
#include "kernels/quant/cache_format.h"
#include "kernels/tensor_view.h"

namespace twinspark {

// dst row index[t] = pack(x[t]). With kF32 it stores x in f32 (also how compressor carries are
// kept).
struct StoreRowsParams {
  ConstTensorView x;  // [num_rows, cols], kF32 or kBf16
  CacheRows dst;
  const int64_t* index = nullptr;  // [num_rows], -1 = do not store; null = row t. No duplicates
};

// out[t] = unpack(src row index[t]).
struct LoadRowsParams {
  CacheRows src;
  const int64_t* index = nullptr;  // [num_rows], >= 0; null = row t
  TensorView out;                  // [num_rows, cols], kF32 or kBf16
};

// dst row dst_index[t] = src row src_index[t], bytes. Same format and cols.
struct CopyRowsParams {
  CacheRows src;
  CacheRows dst;
  int64_t num_rows = 0;
  const int64_t* src_index = nullptr;  // [num_rows]; null = row t
  const int64_t* dst_index = nullptr;  // [num_rows], -1 = skip; null = row t
};

// out = round(unpack(pack(x))): the simulation. kF32: out = round(x).
struct QuantizeValuesParams {
  ConstTensorView x;  // [num_rows, n], n a multiple of the group, kF32 or kBf16
  CacheFormat format = CacheFormat::kF32;
  TensorView out;  // [num_rows, n], kF32 or kBf16; may be x itself
};

void StoreRowsCpu(const StoreRowsParams& params, const Launch& launch);
void LoadRowsCpu(const LoadRowsParams& params, const Launch& launch);
void CopyRowsCpu(const CopyRowsParams& params, const Launch& launch);
void QuantizeValuesCpu(const QuantizeValuesParams& params, const Launch& launch);

}  // namespace twinspark
