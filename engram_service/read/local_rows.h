// Rows without a service process: tables, engine and reader in the caller's own thread. For tools,
// golden programs and tests; what it returns is byte for byte what the service returns.
// One caller at a time.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engram_service/read/gather_engine.h"
#include "engram_service/read/table_set.h"

namespace twinspark::engram {

// Consecutive tokens of one sequence: `ids` starts with the num_history ids before `position`,
// exactly min(position, max n-gram - 1) of them.
struct SequenceView {
  uint32_t position = 0;
  uint32_t num_history = 0;
  std::span<const int32_t> ids;   // history, then tokens
  std::span<const uint8_t> dead;  // empty, or one byte per id, non-zero = dead
};

// Appends the windows of the sequence's tokens; refuses a history of the wrong length.
absl::Status AppendWindows(const Hasher& hasher,
                           const SequenceView& sequence,
                           std::vector<Window>& windows);

class LocalRows {
 public:
  static absl::StatusOr<std::unique_ptr<LocalRows>> Open(const TableSetOptions& options);
  // Over a table set that somebody else owns.
  static std::unique_ptr<LocalRows> Over(const TableSet& tables);

  const TableSet& tables() const { return *tables_; }

  // Rows of all layers for all tokens, in the order given.
  absl::Status Gather(std::span<const SequenceView> sequences);

  // Of the last Gather: [token][owned column][...], see TableSet::columns().
  std::span<const uint8_t> weights(int layer_idx) const {
    return rows_[static_cast<size_t>(layer_idx)].weights;
  }
  std::span<const uint8_t> scales(int layer_idx) const {
    return rows_[static_cast<size_t>(layer_idx)].scales;
  }

 private:
  struct LayerBytes {
    std::vector<uint8_t> weights;
    std::vector<uint8_t> scales;
  };
  LocalRows() = default;

  std::unique_ptr<TableSet> owned_tables_;
  const TableSet* tables_ = nullptr;
  std::unique_ptr<BlockReader> reader_;
  std::unique_ptr<GatherEngine> engine_;
  std::array<LayerBytes, kMaxLayers> rows_;
};

}  // namespace twinspark::engram
