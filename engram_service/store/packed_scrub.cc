// See packed_scrub.h.
#include "engram_service/store/packed_scrub.h"

#include <vector>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "engram_service/store/crc32c.h"
#include "engram_service/store/extent_builder.h"
#include "engram_service/store/row_range_reader.h"

namespace twinspark::engram {

absl::StatusOr<uint64_t> ScrubPackedFile(
    const TableFile& file,
    const PackedLayout& layout,
    std::span<const ExtentEntry> extents,
    const std::function<void(const std::string&)>& report,
    const std::function<void(const ScrubProgress&)>& progress) {
  AlignedBuffer buffer;
  std::vector<uint8_t> bytes(kExtentBytes);
  uint64_t findings = 0;
  for (uint64_t extent = 0; extent < layout.num_extents(); ++extent) {
    const auto pages = std::span<uint8_t>(bytes).first(ExtentBytes(layout, extent));
    RETURN_IF_ERROR(ReadFileRange(file, ExtentOffset(extent), pages, buffer));
    for (uint32_t i = 0; i < layout.ExtentPages(extent); ++i) {
      const absl::Status checked = CheckPage(layout, extent * kPagesPerExtent + i,
                                             pages.subspan(size_t{i} * kPageBytes, kPageBytes));
      if (checked.ok()) continue;
      ++findings;
      report(std::string(checked.message()));
    }
    const ExtentEntry& entry = extents[extent];
    if (Sha256Of(pages) != entry.digest || Crc32c(pages) != entry.crc) {
      ++findings;
      report(absl::StrCat("digest of extent ", extent, " differs"));
    }
    if (progress) progress({extent + 1, layout.num_extents()});
  }
  return findings;
}

}  // namespace twinspark::engram
