// See ids.h.
#include "common/ids.h"

#include <cinttypes>
#include <cstdio>

#include <sys/random.h>
#include <xxhash.h>

#include "common/check.h"

namespace twinspark {

uint64_t Hash64(std::string_view bytes) {
  return XXH64(bytes.data(), bytes.size(), 0);
}

uint64_t Hash64(std::span<const std::byte> bytes) {
  return XXH64(bytes.data(), bytes.size(), 0);
}

std::string Hex16(uint64_t value) {
  char text[17];
  std::snprintf(text, sizeof(text), "%016" PRIx64, value);
  return text;
}

uint64_t RandomU64() {
  uint64_t value = 0;
  CHECK_EQ(getrandom(&value, sizeof(value), 0), static_cast<ssize_t>(sizeof(value)));
  return value;
}

std::string NewId(std::string_view prefix) {
  return std::string(prefix) + Hex16(RandomU64()) + Hex16(RandomU64()).substr(8);
}

}  // namespace twinspark
