// Opening order: configuration, constants, token map, tables; the first that is wrong is named.
#include "engram_service/read/table_set.h"

#include <utility>

#include "absl/strings/str_cat.h"

#include "common/file_util.h"
#include "common/model_config.h"
#include "common/safetensors.h"
#include "common/status_macros.h"
#include "engram_service/store/native_table.h"

namespace twinspark::engram {
namespace {

constexpr size_t kMaxConstantsBytes = size_t{1} << 20;

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
  ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint,
                   Checkpoint::Open(set->options_.engram_dir));
  for (const LayerHash& layer : set->hasher_->layers()) {
    ASSIGN_OR_RETURN(auto table, NativeTable::Open(*checkpoint, set->shape(), layer));
    set->tables_.push_back(std::move(table));
  }
  set->ComputeDigests();
  return set;
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
