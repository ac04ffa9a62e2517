// Engram rows without a row service: hashes in this process and reads from tables held in memory.
// For golden programs and tests of small models.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "engram_service/store/hasher.h"
#include "shard_worker/model/row_source.h"

namespace twinspark::golden {

// The tables of a model and what is needed to look them up. Immutable, shared by the ranks.
struct EngramTables {
  struct Table {
    std::vector<uint8_t> values;  // [rows][head_dim]
    std::vector<uint8_t> scales;  // [rows][head_dim / 32]
  };

  // From the checkpoint in `dir` and its token_map_i32.bin.
  static absl::StatusOr<std::shared_ptr<const EngramTables>> Load(const std::string& dir);

  explicit EngramTables(engram::Hasher h) : hasher(std::move(h)) {}
  engram::Hasher hasher;
  std::vector<Table> tables;  // by module
};

class MemoryRowSource : public RowSource {
 public:
  MemoryRowSource(std::shared_ptr<const EngramTables> tables, int rank, int world);

  absl::Status Request(std::span<const RowRange> ranges, RowClass row_class) override;
  absl::StatusOr<EngramRows> Rows(int module_idx) override;

  // Row numbers [tokens][all columns] of the last request, for comparison.
  std::vector<uint64_t> RowNumbers(int module_idx) const;

 private:
  const std::shared_ptr<const EngramTables> tables_;
  std::vector<int> columns_;
  std::vector<engram::Window> windows_;
  std::vector<uint8_t> values_;
  std::vector<uint8_t> scales_;
};

}  // namespace twinspark::golden
