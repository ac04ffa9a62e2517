// Opening order: configuration, constants, token map, tables; the first that is wrong is named.
#include "engram_service/read/table_set.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/cord.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "common/file_util.h"
#include "common/model_config.h"
#include "common/safetensors.h"
#include "common/status_macros.h"
#include "engram_service/store/compat_table.h"
#include "engram_service/store/native_table.h"
#include "engram_service/store/packed_table.h"
#include "engram_service/store/row_format.h"

namespace twinspark::engram {
namespace {

constexpr size_t kMaxConstantsBytes = size_t{1} << 20;
constexpr size_t kNamesShown = 6;
constexpr char kWrongPackedDir[] = "twinspark/wrong-packed-dir";

// What lies in a directory, for the message: names of packed files, or why there are none.
std::string PackedFilesIn(const std::string& dir) {
  std::error_code error;
  std::vector<std::string> names;
  size_t others = 0;
  for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
    const std::string name = entry.path().filename().string();
    const bool packed = name.ends_with(".egp") || name.ends_with(".bin");
    if (name.starts_with("engram-l") && packed) {
      names.push_back(name);
    } else {
      ++others;
    }
  }
  if (error) return error.message();
  if (names.empty()) return absl::StrCat("no packed files there, ", others, " others");
  std::sort(names.begin(), names.end());
  const size_t shown = std::min(names.size(), kNamesShown);
  const size_t more = names.size() - shown;
  names.resize(shown);
  return absl::StrCat("there: ", absl::StrJoin(names, ", "),
                      more > 0 ? absl::StrCat(" and ", more, " more") : "");
}

absl::Status NoPackedTables(const TableSetOptions& options) {
  absl::Status status = absl::NotFoundError(
      absl::StrCat(options.packed_dir, " has no packed tables of rank ", options.rank, " of ",
                   options.world, " for this model (", PackedFilesIn(options.packed_dir), ")"));
  status.SetPayload(kWrongPackedDir, absl::Cord(options.packed_dir));
  return status;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Hasher>> LoadHasher(const std::string& model_dir) {
  ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(model_dir));
  const EngramShape shape = ShapeFromConfig(config);
  if (shape.layer_ids.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(model_dir, "/config.json has no engram_layer_ids: nothing to serve"));
  }
  ASSIGN_OR_RETURN(TokenMap map, LoadTokenMap(model_dir));
  ASSIGN_OR_RETURN(Hasher hasher, Hasher::Create(shape, std::move(map)));
  const std::string constants = model_dir + "/engram_constants.json";
  if (FileExists(constants)) {
    ASSIGN_OR_RETURN(const std::string text, ReadFile(constants, kMaxConstantsBytes));
    RETURN_IF_ERROR(CheckConstants(shape, hasher.layers(), text, constants));
  }
  return std::make_unique<Hasher>(std::move(hasher));
}

absl::StatusOr<std::unique_ptr<TableSet>> TableSet::Open(const TableSetOptions& options) {
  std::unique_ptr<TableSet> set(new TableSet);
  set->options_ = options;
  if (set->options_.engram_dir.empty()) set->options_.engram_dir = options.model_dir;
  ASSIGN_OR_RETURN(set->hasher_, LoadHasher(options.model_dir));
  ASSIGN_OR_RETURN(set->columns_, BalancedColumns(set->shape(), options.rank, options.world));
  const bool packed_given = !options.packed_dir.empty();
  if (!packed_given) set->options_.packed_dir = set->options_.engram_dir;
  RETURN_IF_ERROR(set->OpenTables(packed_given));
  set->ComputeDigests();
  return set;
}

// The best format of which a file is there: our packed one, the other packed one, native. Whoever
// names a packed directory means its files: native tables do not stand in for them.
absl::Status TableSet::OpenTables(bool packed_given) {
  const std::vector<LayerHash> layers(hasher_->layers().begin(), hasher_->layers().end());
  size_t packed = 0;
  size_t compat = 0;
  for (const LayerHash& layer : layers) {
    packed += FileExists(PackedPath(options_, layer.layer_id)) ? 1 : 0;
    compat += CompatPaths(options_.packed_dir, layer.layer_id).empty() ? 0 : 1;
  }
  if (packed > 0) {
    for (size_t i = 0; i < layers.size(); ++i) {
      ASSIGN_OR_RETURN(auto table,
                       PackedTable::Open(PackedPath(options_, layers[i].layer_id), *hasher_,
                                         static_cast<int>(i), columns_, options_.direct));
      tables_.push_back(std::move(table));
    }
    return absl::OkStatus();
  }
  if (compat > 0) return OpenCompat(layers);
  if (packed_given) return NoPackedTables(options_);
  if (options_.require_packed) {
    return absl::NotFoundError(absl::StrCat("ENGRAM_REQUIRE_PACKED is set and ",
                                            PackedPath(options_, layers.front().layer_id),
                                            " does not exist: run pack_rows"));
  }
  ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint,
                   Checkpoint::Open(options_.engram_dir));
  for (const LayerHash& layer : layers) {
    ASSIGN_OR_RETURN(auto table, NativeTable::Open(*checkpoint, shape(), layer, options_.direct));
    tables_.push_back(std::move(table));
  }
  return absl::OkStatus();
}

absl::Status TableSet::OpenCompat(const std::vector<LayerHash>& layers) {
  for (const LayerHash& layer : layers) {
    ASSIGN_OR_RETURN(auto table, CompatTable::Open(CompatPaths(options_.packed_dir, layer.layer_id),
                                                   shape(), layer, options_.direct));
    for (const int column : columns_) {
      if (table->HasColumn(column)) continue;
      return absl::FailedPreconditionError(absl::StrCat(
          table->path(), ": its rows do not cover column ", column, " of rank ", options_.rank,
          " of ", options_.world,
          "; put the files of the other ranks beside it, or run pack_rows on this node"));
    }
    tables_.push_back(std::move(table));
  }
  return absl::OkStatus();
}

bool IsWrongPackedDir(const absl::Status& status) {
  return status.GetPayload(kWrongPackedDir).has_value();
}

std::string PackedPath(const TableSetOptions& options, int layer_id) {
  PackedHeader header = {};
  header.layer = static_cast<uint32_t>(layer_id);
  header.node = static_cast<uint32_t>(options.rank);
  header.nodes = static_cast<uint32_t>(options.world);
  header.scheme = options.world == 1 ? kSchemeAll : kSchemeBalanced;
  return options.packed_dir + "/" + PackedFileName(header);
}

std::vector<std::string> CompatPaths(const std::string& dir, int layer_id) {
  const std::string prefix = absl::StrCat("engram-l", layer_id, "-r");
  std::vector<std::string> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(dir, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(prefix) && name.ends_with(".bin")) paths.push_back(entry.path().string());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

void TableSet::ComputeDigests() {
  hash_params_digest_ = HashParamsDigest(hasher_->layers());
  Sha256 tables;
  for (const auto& table : tables_)
    tables.Update(table->digest());
  const Sha256Digest table_digest = tables.Finish();
  for (size_t i = 0; i < 8; ++i) {
    table_digest_prefix_ |= static_cast<uint64_t>(table_digest[i]) << (8 * i);
  }
  Sha256 all;
  all.Update(table_digest);
  all.Update(hasher_->token_map().digest());
  all.Update(hash_params_digest_);
  all.UpdateU32(static_cast<uint32_t>(options_.rank));
  all.UpdateU32(static_cast<uint32_t>(options_.world));
  for (const int column : columns_)
    all.UpdateU32(static_cast<uint32_t>(column));
  model_digest_ = all.Finish();
}

}  // namespace twinspark::engram
