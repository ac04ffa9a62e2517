// How vectors lie in the caches: the three quantisers of the model (specification 3.0) in packed,
// exact form, or plain f32 where the quantisers are switched off. A packed row is its codes
// followed by its scales, no padding:
//   kQ8    e4m3 byte per value,           e8m0 byte per 32   (window rings: 528 bytes for 512)
//   kQ4E8  e2m1 nibble (low first),       e8m0 byte per 32   (index keys:    68 bytes for 128)
//   kQ4E4  e2m1 nibble (low first),       e4m3 byte per 16   (compressed rows: 288 bytes for 512)
//   kF32   f32 per value, little-endian: identity, for the f32 numerics option
// Values decoded from a packed row are those the quantiser simulation would give, bit for bit
// (at most 6 significant bits, so exact in bf16 too).
#pragma once

#include <cstdint>

namespace twinspark {

enum class CacheFormat : uint8_t { kF32, kQ8, kQ4E8, kQ4E4 };

const char* CacheFormatName(CacheFormat format);

// Values per scale; 1 for kF32. The length of a row must be a multiple of it.
int CacheGroup(CacheFormat format);

// Bytes of one stored row of `cols` values.
int64_t CacheRowBytes(CacheFormat format, int64_t cols);

// An array of equal rows: the rings of one layer (all slots), or the pages of one compressed cache.
// Row index = slot * ring_slots + position % ring_slots, or
// physical_page * rows_per_page + group % rows_per_page.
struct CacheRows {
  void* data = nullptr;
  CacheFormat format = CacheFormat::kF32;
  int64_t num_rows = 0;
  int64_t cols = 0;

  int64_t row_bytes() const { return CacheRowBytes(format, cols); }
};

}  // namespace twinspark
