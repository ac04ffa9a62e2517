// What one row service serves: the hasher of a model and an open table per Engram layer, for the
// columns of one rank. Chooses the file format found on disk and says which (tier). Immutable after
// Open; thread-safe. Callers: the service, tools, golden programs (through LocalRows).
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

#include "engram_service/store/hasher.h"
#include "engram_service/store/row_table.h"

namespace twinspark::engram {

struct TableSetOptions {
  std::string model_dir;        // config.json, token map or tokenizer
  std::string engram_dir = {};  // tables; empty = model_dir
  int rank = 0;
  int world = 1;
  // Packed files; empty = engram_dir, where native tables do as well. A directory that is named
  // must hold this rank's files. A packed file that is there must be right: a wrong one is refused,
  // never passed over.
  std::string packed_dir = {};
  bool require_packed = false;  // native tables are refused
  bool direct = false;          // read past the page cache
};

class TableSet {
 public:
  static absl::StatusOr<std::unique_ptr<TableSet>> Open(const TableSetOptions& options);

  const TableSetOptions& options() const { return options_; }
  const Hasher& hasher() const { return *hasher_; }
  const EngramShape& shape() const { return hasher_->shape(); }
  int num_layers() const { return static_cast<int>(tables_.size()); }
  const RowTable& table(int layer_idx) const { return *tables_[static_cast<size_t>(layer_idx)]; }
  // Owned columns, ascending; the same in every layer.
  const std::vector<int>& columns() const { return columns_; }
  std::string_view tier() const { return tables_.front()->tier(); }

  const Sha256Digest& hash_params_digest() const { return hash_params_digest_; }
  // Over tables, token map, hash constants, columns: what a client's rows depend on.
  const Sha256Digest& model_digest() const { return model_digest_; }
  // First 8 bytes of the digest of the tables; every reply carries it.
  uint64_t table_digest_prefix() const { return table_digest_prefix_; }

 private:
  TableSet() = default;
  absl::Status OpenTables(bool packed_given);
  absl::Status OpenCompat(const std::vector<LayerHash>& layers);
  void ComputeDigests();

  TableSetOptions options_;
  std::unique_ptr<Hasher> hasher_;
  std::vector<std::unique_ptr<RowTable>> tables_;
  std::vector<int> columns_;
  Sha256Digest hash_params_digest_{};
  Sha256Digest model_digest_{};
  uint64_t table_digest_prefix_ = 0;
};

// Whether Open failed because packed_dir was named and holds nothing of this rank: a wrong setting,
// not a wrong table.
bool IsWrongPackedDir(const absl::Status& status);

// Where a packed file of the layer would lie, by the naming of engram.md 3.3.
std::string PackedPath(const TableSetOptions& options, int layer_id);

// Files of the DSV41EN1 layout for the layer in a directory, ascending.
std::vector<std::string> CompatPaths(const std::string& dir, int layer_id);

// The hasher of a model directory: config.json, engram_constants.json when present, token map.
absl::StatusOr<std::unique_ptr<Hasher>> LoadHasher(const std::string& model_dir);

}  // namespace twinspark::engram
