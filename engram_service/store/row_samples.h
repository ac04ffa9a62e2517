// Digests of some rows of every column of a layer's table. Each rank serves its own half of the
// columns from its own files, so nothing that one of them reads tells that the other's table is
// another one of the same shape; but a rank with a native table knows all columns, and a packed
// file was made from a whole table and says in its manifest what it sampled there. Whatever two
// ranks both know must be equal (the workers compare, shard_worker/backend/compare_ranks).
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "engram_service/store/hash_params.h"
#include "engram_service/store/row_table.h"

namespace twinspark::engram {

// By column of the whole table: kRowSampleBytes bytes, or empty where nothing is known.
using RowSamples = std::vector<std::string>;

inline constexpr uint32_t kSampledRowsPerColumn = 32;  // evenly spaced, the first one included
inline constexpr size_t kRowSampleBytes = 16;  // of a SHA-256 over layer, column, prime, rows

// Of the columns that the table holds. Reads some 32 blocks per column, past no cache of ours.
absl::StatusOr<RowSamples> SampleRows(const RowTable& table, const LayerHash& layer);

// The first column that both know and that differs; -1 when there is none.
int FirstDifference(const RowSamples& a, const RowSamples& b);

// What is known of the whole table that `table` is, or was packed from: its own columns by reading
// them, the others of a packed file from its manifest. DATA_LOSS when the two contradict each
// other.
absl::StatusOr<RowSamples> SamplesOfWholeTable(const RowTable& table, const LayerHash& layer);

}  // namespace twinspark::engram
