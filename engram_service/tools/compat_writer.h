// Writes a DSV41EN1 file from a table, for comparison with other recipes' packs (their published
// whole-file digests prove the table reader end to end). Written beside and renamed; not resumable.
// Caller: pack_rows --format compat.
#pragma once

#include <functional>
#include <string>

#include "absl/status/statusor.h"

#include "engram_service/store/hash_params.h"
#include "engram_service/store/row_table.h"

namespace twinspark::engram {

enum class CompatSplit : uint8_t { kColumns, kEqualRows };

struct CompatOptions {
  std::string out_dir;
  int rank = 0;
  int world = 1;
  CompatSplit split = CompatSplit::kColumns;
  std::function<void(uint64_t rows_done, uint64_t rows_total)> progress;
};

// Returns the path.
absl::StatusOr<std::string> WriteCompatFile(const RowTable& source,
                                            const EngramShape& shape,
                                            const LayerHash& layer,
                                            const CompatOptions& options);

}  // namespace twinspark::engram
