// The packer's journal: one 64-byte record per extent whose data is durable, in order, each with
// its own CRC. A torn or damaged record ends it. Spec: engram.md 3.4.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "engram_service/store/row_format.h"

namespace twinspark::engram {

struct JournalRecord {
  uint32_t magic;  // "EGJR"
  uint32_t version;
  uint64_t extent;
  ExtentEntry entry;
  uint32_t plan;  // low bits of the plan's digest: a journal of another plan is not believed
  uint32_t crc;   // of bytes 0..59
};
static_assert(sizeof(JournalRecord) == 64);

JournalRecord MakeJournalRecord(uint64_t extent, const ExtentEntry& entry, uint32_t plan);

// Entries of the leading valid records, extents 0, 1, 2 ...
std::vector<ExtentEntry> ParseJournal(std::span<const uint8_t> bytes, uint32_t plan);

}  // namespace twinspark::engram
