// The header region of a packed row file on any bytes: an error that says what is wrong, or a
// layout whose pages cover its segments and in which a page that was built passes its check, and
// only at its own place. The input: one byte of options, the 332 bytes of the header that mean
// something, then segments. Checksums are made right unless an option says otherwise, since no
// mutation would find them.
#include "engram_service/store/row_format.h"

#include <algorithm>
#include <cstring>

#include "common/check.h"
#include "common/testing/fuzz_driver.h"
#include "engram_service/store/crc32c.h"

namespace {

using namespace twinspark::engram;  // NOLINT: one file, many names

constexpr size_t kMeaningful = offsetof(PackedHeader, padding);
enum Option : uint8_t { kLeaveHeaderCrc = 1, kLeaveSegmentCrcs = 2, kOtherFileSize = 4 };

std::vector<std::string> Seeds() {
  EngramShape shape;
  shape.max_ngram_size = 4;
  shape.num_heads = 2;
  shape.head_dim = 64;
  LayerHash layer;
  layer.layer_id = 1;
  layer.primes = {17, 19, 23, 29, 31, 37};
  for (const uint32_t prime : layer.primes) {
    layer.offsets.push_back(layer.num_rows);
    layer.num_rows += prime;
  }
  std::vector<std::string> seeds;
  for (const PackTarget& target : {PackTarget{0, 1, kSchemeAll, {0, 1, 2, 3, 4, 5}},
                                   PackTarget{1, 2, kSchemeBalanced, {2, 5}}}) {
    const auto layout = PlanPackedFile(shape, layer, target);
    CHECK(layout.ok()) << layout.status();
    std::string seed(1, '\0');
    seed.append(reinterpret_cast<const char*>(&layout->header), kMeaningful);
    seed.append(reinterpret_cast<const char*>(layout->segments.data()),
                layout->segments.size() * sizeof(PackedSegment));
    seeds.push_back(seed);
  }
  return seeds;
}

std::vector<uint8_t> RegionOf(std::string_view input, uint8_t options) {
  std::vector<uint8_t> region(kHeaderRegionBytes);
  const std::string_view head = input.substr(0, kMeaningful);
  const std::string_view rest = input.substr(head.size()).substr(0, kMaxSegments * 64);
  std::copy(head.begin(), head.end(), region.begin());
  std::copy(rest.begin(), rest.end(), region.begin() + sizeof(PackedHeader));
  const std::span<uint8_t> bytes(region);
  const auto seal = [&](size_t begin, size_t size) {
    const uint32_t crc = Crc32c(bytes.subspan(begin, size - 4));
    std::memcpy(&region[begin + size - 4], &crc, sizeof(crc));
  };
  if ((options & kLeaveHeaderCrc) == 0) seal(0, sizeof(PackedHeader));
  if ((options & kLeaveSegmentCrcs) == 0) {
    for (size_t at = 0; at + 64 <= rest.size(); at += 64)
      seal(sizeof(PackedHeader) + at, sizeof(PackedSegment));
  }
  return region;
}

void CheckLayout(const PackedLayout& layout) {
  const PackedHeader& h = layout.header;
  CHECK(!PackedFileName(h).empty());
  for (const PackedSegment& segment : layout.segments) {
    CHECK(segment.rows <= h.table_rows && segment.global_row_lo <= h.table_rows - segment.rows)
        << segment.global_row_lo << " + " << segment.rows << " of " << h.table_rows;
    const uint64_t last = segment.first_page + segment.page_count - 1;
    CHECK_LT(last, h.pages);
    CHECK(&layout.SegmentOfPage(segment.first_page) == &segment);
    CHECK(&layout.SegmentOfPage(last) == &segment);
    const PageRows rows = RowsOfPage(layout, last);
    CHECK(rows.count >= 1 && rows.count <= kRowsPerPage) << rows.count;
    CHECK_EQ(rows.first_row + rows.count, segment.global_row_lo + segment.rows);
  }
  const uint64_t page = h.pages - 1;
  const PageRows rows = RowsOfPage(layout, page);
  const std::vector<uint8_t> weights(size_t{rows.count} * h.row_weight_bytes, 3);
  const std::vector<uint8_t> scales(size_t{rows.count} * h.row_scale_bytes, 4);
  std::vector<uint8_t> built(kPageBytes);
  BuildPage(layout, page, weights, scales, built);
  CHECK(CheckPage(layout, page, built).ok());
  CHECK(!CheckPage(layout, page + 1, built).ok());
  if (page > 0) CHECK(!CheckPage(layout, page - 1, built).ok());
  constexpr uint64_t kLargestFooter = 1 << 20;
  if (h.footer_bytes > kLargestFooter) return;
  CHECK(!ParseFooter(layout, std::vector<uint8_t>(h.footer_bytes, 7)).ok());
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const std::string_view input(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::vector<uint8_t> region = RegionOf(input, data[0]);
  uint64_t file_bytes = 1 << 20;
  if ((data[0] & kOtherFileSize) == 0)
    std::memcpy(&file_bytes, &region[offsetof(PackedHeader, file_bytes)], sizeof(file_bytes));
  const auto layout = ParseHeaderRegion(region, file_bytes);
  if (layout.ok()) {
    CheckLayout(*layout);
  } else {
    CHECK(!layout.status().message().empty());
  }
  return 0;
}

TWINSPARK_FUZZ_MAIN(Seeds())
