// Sizes of the stored rows.
#include "kernels/quant/cache_format.h"

#include "common/check.h"

namespace twinspark {

const char* CacheFormatName(CacheFormat format) {
  switch (format) {
    case CacheFormat::kF32:
      return "f32";
    case CacheFormat::kQ8:
      return "q8";
    case CacheFormat::kQ4E8:
      return "q4e8";
    case CacheFormat::kQ4E4:
      return "q4e4";
  }
  return "unknown";
}

int CacheGroup(CacheFormat format) {
  switch (format) {
    case CacheFormat::kF32:
      return 1;
    case CacheFormat::kQ8:
    case CacheFormat::kQ4E8:
      return 32;
    case CacheFormat::kQ4E4:
      return 16;
  }
  return 1;
}

int64_t CacheRowBytes(CacheFormat format, int64_t cols) {
  const int64_t group = CacheGroup(format);
  CHECK_EQ(cols % group, 0) << CacheFormatName(format);
  switch (format) {
    case CacheFormat::kF32:
      return cols * static_cast<int64_t>(sizeof(float));
    case CacheFormat::kQ8:
      return cols + cols / group;
    case CacheFormat::kQ4E8:
    case CacheFormat::kQ4E4:
      return cols / 2 + cols / group;
  }
  return 0;
}

}  // namespace twinspark
