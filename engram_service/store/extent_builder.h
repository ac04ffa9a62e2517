// One extent of a packed file from the rows of its source: read, checked, laid out page by page,
// hashed. Thread-safe: works on what it is given. Callers: row_table_writer, pack_checker.
#pragma once

#include "absl/status/status.h"

#include "engram_service/store/pack_pipeline.h"
#include "engram_service/store/row_format.h"
#include "engram_service/store/row_range_reader.h"
#include "engram_service/store/row_table.h"

namespace twinspark::engram {

inline constexpr size_t kExtentBytes = size_t{kPagesPerExtent} * kPageBytes;

// Where extent `extent` lies in the file and how long it is.
inline uint64_t ExtentOffset(uint64_t extent) {
  return kHeaderRegionBytes + extent * kExtentBytes;
}
inline size_t ExtentBytes(const PackedLayout& layout, uint64_t extent) {
  return size_t{layout.ExtentPages(extent)} * kPageBytes;
}

// Rows of extent work.extent into work.weights and work.scales; a read that fails is tried again.
absl::Status ReadExtent(const RowTable& source,
                        const PackedLayout& layout,
                        ExtentWork& work,
                        AlignedBuffer& buffer);

// Pages and entry of the extent from those rows. DATA_LOSS with the row number for NaN codes and
// scale 255.
absl::Status BuildExtent(const RowTable& source, const PackedLayout& layout, ExtentWork& work);

}  // namespace twinspark::engram
