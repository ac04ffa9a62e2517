// EGPACK01, our packed table file: one file per layer and node, 4 KiB pages of 15 rows with their
// scales, identity and checksum, so that one read serves a row and proves it. On-disk structs with
// their offsets asserted, and what follows from them; no file is opened here. Little endian
// throughout. Spec: engram.md 3.3. Callers: packed_table, row_table_writer, verify_rows,
// golden_engram.
//
//   0 header block | 4096 segment table | 65536 pages | footer, a multiple of 4096 bytes
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engram_service/store/hash_params.h"
#include "engram_service/store/sha256.h"

namespace twinspark::engram {

static_assert(std::endian::native == std::endian::little, "structs are written as they lie");

inline constexpr uint32_t kPageBytes = 4096;
inline constexpr uint32_t kRowsPerPage = 15;
inline constexpr uint32_t kHeaderRegionBytes = 65536;
inline constexpr uint32_t kPagesPerExtent = 4096;  // 16 MiB
inline constexpr uint32_t kMaxSegments = (kHeaderRegionBytes - 4096) / 64;
inline constexpr uint32_t kPageMagic = 0x47504745;  // "EGPG"
inline constexpr uint32_t kPageTrailerOffset = 3960;

enum PackScheme : uint32_t { kSchemeContiguous = 1, kSchemeBalanced = 2, kSchemeAll = 3 };
enum PackState : uint32_t { kStateBuilding = 0, kStateSealed = 1 };

struct PackedHeader {
  char magic[8];  // "EGPACK01"
  uint32_t version;
  uint32_t header_region_bytes;
  uint32_t page_bytes;
  uint32_t rows_per_page;
  uint32_t row_weight_bytes;
  uint32_t row_scale_bytes;
  uint32_t weight_dtype;  // 1 = E4M3FN
  uint32_t scale_dtype;   // 2 = E8M0
  uint32_t scale_group;   // weights per scale: 32
  uint32_t layer;
  uint32_t node;
  uint32_t nodes;
  uint32_t scheme;
  uint32_t heads;
  uint32_t max_ngram;
  uint32_t segments;
  uint64_t table_rows;
  uint64_t rows_here;
  uint64_t data_offset;
  uint64_t pages;
  uint64_t file_bytes;
  uint64_t footer_offset;
  uint64_t footer_bytes;
  Sha256Digest index_digest;
  Sha256Digest source_header_digest;
  Sha256Digest token_map_digest;
  Sha256Digest hash_params_digest;
  uint64_t source_weight_offset;
  uint64_t source_scale_offset;
  uint64_t generation;
  uint64_t zero;
  uint64_t created_unix;
  uint32_t state;
  Sha256Digest footer_digest;
  uint8_t padding[4092 - 332];
  uint32_t crc;  // of bytes 0..4091
};
static_assert(sizeof(PackedHeader) == 4096);
static_assert(offsetof(PackedHeader, layer) == 44 && offsetof(PackedHeader, table_rows) == 72);
static_assert(offsetof(PackedHeader, index_digest) == 128);
static_assert(offsetof(PackedHeader, source_weight_offset) == 256);
static_assert(offsetof(PackedHeader, state) == 296);
static_assert(offsetof(PackedHeader, footer_digest) == 300 && offsetof(PackedHeader, crc) == 4092);

struct PackedSegment {
  uint32_t column;
  uint32_t order;
  uint32_t head;
  uint32_t prime;
  uint64_t global_row_lo;
  uint64_t rows;
  uint64_t first_page;
  uint64_t page_count;
  uint8_t zero[12];
  uint32_t crc;  // of bytes 0..59
};
static_assert(sizeof(PackedSegment) == 64);

struct PageTrailer {
  uint32_t magic;
  uint16_t version;
  uint16_t valid_rows;
  uint64_t first_row;   // global row of slot 0
  uint64_t page_index;  // in the data region
  uint32_t layer;
  uint32_t column;
  uint64_t generation;
  uint8_t zero[92];
  uint32_t crc;  // of bytes 0..4091 of the page
};
static_assert(sizeof(PageTrailer) == kPageBytes - kPageTrailerOffset);

struct PackedFooter {
  char magic[8];  // "EGFOOT01"
  uint32_t version;
  uint32_t pages_per_extent;
  uint64_t extents;
  uint64_t pages;
  Sha256Digest digests;  // SHA-256 of the extent entries
};
static_assert(sizeof(PackedFooter) == 64);

struct ExtentEntry {
  uint32_t crc;
  uint32_t pages;
  Sha256Digest digest;
};
static_assert(sizeof(ExtentEntry) == 40);

// What a file of this layer and these columns looks like: header (state building, digests of source
// and footer zero until they are known) and segments, both with their CRCs.
struct PackedLayout {
  PackedHeader header;
  std::vector<PackedSegment> segments;

  uint64_t num_extents() const { return (header.pages + kPagesPerExtent - 1) / kPagesPerExtent; }
  uint32_t ExtentPages(uint64_t extent) const;
  // The segment a page of the data region belongs to.
  const PackedSegment& SegmentOfPage(uint64_t page) const;
};

struct PackTarget {
  uint32_t node = 0;
  uint32_t nodes = 1;
  PackScheme scheme = kSchemeAll;
  std::vector<int> columns;  // ascending
};

absl::StatusOr<PackedLayout> PlanPackedFile(const EngramShape& shape,
                                            const LayerHash& layer,
                                            const PackTarget& target);

// Computes the CRC over everything before it.
void SealHeader(PackedHeader& header);

// The first 64 KiB of a file.
std::vector<uint8_t> HeaderRegion(const PackedLayout& layout);

// Parses and checks them: magic, version, CRCs, geometry, segments without gap; the error names the
// field. `file_bytes` is the real size. Does not look at `state` or at digests.
absl::StatusOr<PackedLayout> ParseHeaderRegion(std::span<const uint8_t> bytes, uint64_t file_bytes);

// Footer of the extents, padded, and its check against the header.
std::vector<uint8_t> FooterBytes(const PackedLayout& layout, std::span<const ExtentEntry> extents);
absl::StatusOr<std::vector<ExtentEntry>> ParseFooter(const PackedLayout& layout,
                                                     std::span<const uint8_t> bytes);

// Lays out page `page` in `out` (4096 bytes) from the rows of slots 0..valid-1, dense weights and
// scales, with trailer and CRC.
void BuildPage(const PackedLayout& layout,
               uint64_t page,
               std::span<const uint8_t> weights,
               std::span<const uint8_t> scales,
               std::span<uint8_t> out);

// Rows a page holds and the global row of its first slot.
struct PageRows {
  uint64_t first_row = 0;
  uint32_t count = 0;
};
PageRows RowsOfPage(const PackedLayout& layout, uint64_t page);

// CRC and identity: a page that was written for another place, file or generation is refused.
absl::Status CheckPage(const PackedLayout& layout, uint64_t page, std::span<const uint8_t> bytes);

// "engram-l01.n0of2.bal.egp"
std::string PackedFileName(const PackedHeader& header);

}  // namespace twinspark::engram
