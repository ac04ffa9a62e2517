// CRC-32C (reflected polynomial 0x82F63B78, initial and final XOR all ones), with the processor's
// instruction where there is one: packed pages carry it and every served page is checked.
#pragma once

#include <cstdint>
#include <span>

namespace twinspark::engram {

// check("123456789") = 0xe3069283. `before` continues an earlier result.
uint32_t Crc32c(std::span<const uint8_t> bytes, uint32_t before = 0);

}  // namespace twinspark::engram
