// The x86 and Arm instructions take eight bytes at a time and can start one per cycle, but each
// needs the result of the one before for three: so long inputs are taken as three streams side by
// side (a 4 KiB page in 0.2 us instead of 0.6) and joined with a table that moves a CRC over a
// stream's length. The plain table is for processors without the instruction.
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

// A third of a page without its last four bytes, in whole words.
constexpr size_t kStreamBytes = 1360;

// What kStreamBytes zero bytes make of a CRC register, for each byte of it: the register is linear,
// so the four parts add up.
struct StreamShift {
  StreamShift() {
    static constexpr std::array<uint8_t, kStreamBytes> kZeros{};
    for (size_t byte = 0; byte < 4; ++byte) {
      for (uint32_t value = 0; value < 256; ++value)
        parts[byte][value] = WithTable(kZeros.data(), kZeros.size(), value << (8 * byte));
    }
  }
  uint32_t operator()(uint32_t crc) const {
    return parts[0][crc & 255] ^ parts[1][crc >> 8 & 255] ^ parts[2][crc >> 16 & 255] ^
           parts[3][crc >> 24];
  }
  std::array<std::array<uint32_t, 256>, 4> parts;
};

uint64_t Word(const uint8_t* data) {
  uint64_t word;
  memcpy(&word, data, 8);
  return word;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) uint32_t WithInstruction(const uint8_t* data,
                                                           size_t size,
                                                           uint32_t crc) {
  uint64_t wide = crc;
  static const StreamShift shift;
  for (; size >= 3 * kStreamBytes; data += 3 * kStreamBytes, size -= 3 * kStreamBytes) {
    uint64_t second = 0;
    uint64_t third = 0;
    for (size_t i = 0; i < kStreamBytes; i += 8) {
      wide = _mm_crc32_u64(wide, Word(data + i));
      second = _mm_crc32_u64(second, Word(data + kStreamBytes + i));
      third = _mm_crc32_u64(third, Word(data + 2 * kStreamBytes + i));
    }
    wide = shift(static_cast<uint32_t>(wide)) ^ second;
    wide = shift(static_cast<uint32_t>(wide)) ^ third;
  }
  for (; size >= 8; data += 8, size -= 8)
    wide = _mm_crc32_u64(wide, Word(data));
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
  static const StreamShift shift;
  for (; size >= 3 * kStreamBytes; data += 3 * kStreamBytes, size -= 3 * kStreamBytes) {
    uint32_t second = 0;
    uint32_t third = 0;
    for (size_t i = 0; i < kStreamBytes; i += 8) {
      crc = __crc32cd(crc, Word(data + i));
      second = __crc32cd(second, Word(data + kStreamBytes + i));
      third = __crc32cd(third, Word(data + 2 * kStreamBytes + i));
    }
    crc = shift(crc) ^ second;
    crc = shift(crc) ^ third;
  }
  for (; size >= 8; data += 8, size -= 8)
    crc = __crc32cd(crc, Word(data));
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
