// The x86 and Arm instructions take eight bytes at a time (a 4 KiB page in under half a
// microsecond); the table is for processors without them.
#include "engram_service/store/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace twinspark::engram {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;

constexpr std::array<uint32_t, 256> MakeTable() {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < 256; ++i) {
    uint32_t crc = i;
    for (int bit = 0; bit < 8; ++bit)
      crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    table[i] = crc;
  }
  return table;
}

uint32_t WithTable(const uint8_t* data, size_t size, uint32_t crc) {
  static constexpr std::array<uint32_t, 256> kTable = MakeTable();
  for (size_t i = 0; i < size; ++i)
    crc = (crc >> 8) ^ kTable[(crc ^ data[i]) & 255];
  return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t WithInstruction(const uint8_t* data,
                                                           size_t size,
                                                           uint32_t crc) {
  uint64_t wide = crc;
  for (; size >= 8; data += 8, size -= 8) {
    uint64_t word;
    memcpy(&word, data, 8);
    wide = _mm_crc32_u64(wide, word);
  }
  crc = static_cast<uint32_t>(wide);
  for (; size > 0; ++data, --size)
    crc = _mm_crc32_u8(crc, *data);
  return crc;
}
bool HasInstruction() {
  return __builtin_cpu_supports("sse4.2") != 0;
}
#elif defined(__aarch64__)
__attribute__((target("+crc"))) uint32_t WithInstruction(const uint8_t* data,
                                                         size_t size,
                                                         uint32_t crc) {
  for (; size >= 8; data += 8, size -= 8) {
    uint64_t word;
    memcpy(&word, data, 8);
    crc = __crc32cd(crc, word);
  }
  for (; size > 0; ++data, --size)
    crc = __crc32cb(crc, *data);
  return crc;
}
bool HasInstruction() {
  return (getauxval(AT_HWCAP) & (1 << 7)) != 0;
}  // HWCAP_CRC32
#else
uint32_t WithInstruction(const uint8_t* data, size_t size, uint32_t crc) {
  return WithTable(data, size, crc);
}
bool HasInstruction() {
  return false;
}
#endif

}  // namespace

uint32_t Crc32c(std::span<const uint8_t> bytes, uint32_t before) {
  static const bool has_instruction = HasInstruction();
  const uint32_t crc = ~before;
  return ~(has_instruction ? WithInstruction(bytes.data(), bytes.size(), crc)
                           : WithTable(bytes.data(), bytes.size(), crc));
}

}  // namespace twinspark::engram
