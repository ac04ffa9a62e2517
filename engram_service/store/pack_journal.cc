// Reading stops at the first record that is not exactly what should stand there.
#include "engram_service/store/pack_journal.h"

#include <cstring>

#include "engram_service/store/crc32c.h"

namespace twinspark::engram {
namespace {

constexpr uint32_t kMagic = 0x524A4745;  // "EGJR"

uint32_t RecordCrc(const JournalRecord& record) {
  return Crc32c({reinterpret_cast<const uint8_t*>(&record), 60});
}

}  // namespace

JournalRecord MakeJournalRecord(uint64_t extent, const ExtentEntry& entry, uint32_t plan) {
  JournalRecord record = {kMagic, 1, extent, entry, plan, 0};
  record.crc = RecordCrc(record);
  return record;
}

std::vector<ExtentEntry> ParseJournal(std::span<const uint8_t> bytes, uint32_t plan) {
  std::vector<ExtentEntry> entries;
  for (size_t at = 0; at + sizeof(JournalRecord) <= bytes.size(); at += sizeof(JournalRecord)) {
    JournalRecord record;
    memcpy(&record, &bytes[at], sizeof(record));
    if (record.magic != kMagic || record.version != 1 || record.extent != entries.size() ||
        record.plan != plan || record.crc != RecordCrc(record)) {
      break;
    }
    entries.push_back(record.entry);
  }
  return entries;
}

}  // namespace twinspark::engram
