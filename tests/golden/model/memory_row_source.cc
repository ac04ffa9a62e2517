// Look-ups in memory (memory_row_source.h).
#include "tests/golden/model/memory_row_source.h"

#include <cstring>

#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "common/model_config.h"
#include "common/safetensors.h"
#include "common/status_macros.h"
#include "engram_service/store/token_map.h"

namespace twinspark::golden {
namespace {

absl::StatusOr<std::vector<uint8_t>> ReadBytes(const Checkpoint& checkpoint,
                                               const std::string& name,
                                               uint64_t bytes) {
  const StoredTensor* tensor = checkpoint.Find(name);
  if (tensor == nullptr || static_cast<uint64_t>(tensor->bytes) != bytes)
    return absl::InvalidArgumentError(absl::StrCat(checkpoint.dir(), ": tensor ", name,
                                                   " is missing or not of ", bytes, " bytes"));
  std::vector<uint8_t> out(bytes);
  RETURN_IF_ERROR(checkpoint.Read(*tensor, 0, std::as_writable_bytes(std::span(out))));
  return out;
}

}  // namespace

absl::StatusOr<std::shared_ptr<const EngramTables>> EngramTables::Load(const std::string& dir) {
  ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(dir));
  const engram::EngramShape shape = engram::ShapeFromConfig(config);
  ASSIGN_OR_RETURN(engram::TokenMap map, engram::LoadTokenMap(dir));
  ASSIGN_OR_RETURN(engram::Hasher hasher, engram::Hasher::Create(shape, std::move(map)));
  ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint, Checkpoint::Open(dir));
  auto tables = std::make_shared<EngramTables>(std::move(hasher));
  for (const engram::LayerHash& layer : tables->hasher.layers()) {
    Table table;
    const std::string name = absl::StrCat("layers.", layer.layer_id, ".engram.embed");
    const uint64_t width = static_cast<uint64_t>(shape.head_dim);
    ASSIGN_OR_RETURN(table.values,
                     ReadBytes(*checkpoint, name + ".weight", layer.num_rows * width));
    ASSIGN_OR_RETURN(table.scales,
                     ReadBytes(*checkpoint, name + ".scale", layer.num_rows * width / 32));
    tables->tables.push_back(std::move(table));
  }
  return tables;
}

MemoryRowSource::MemoryRowSource(std::shared_ptr<const EngramTables> tables, int rank, int world)
    : tables_(std::move(tables)) {
  absl::StatusOr<std::vector<int>> columns =
      engram::BalancedColumns(tables_->hasher.shape(), rank, world);
  CHECK(columns.ok()) << columns.status().ToString();
  columns_ = *std::move(columns);
}

absl::Status MemoryRowSource::Request(std::span<const RowRange> ranges, RowClass) {
  windows_.clear();
  for (const RowRange& range : ranges) {
    std::vector<int32_t> ids(range.history.begin(), range.history.end());
    ids.insert(ids.end(), range.ids.begin(), range.ids.end());
    const size_t begin = windows_.size();
    windows_.resize(begin + range.ids.size());
    RETURN_IF_ERROR(tables_->hasher.Windows(ids, range.history.size(), range.dead,
                                            std::span(windows_).subspan(begin)));
  }
  return absl::OkStatus();
}

absl::StatusOr<EngramRows> MemoryRowSource::Rows(int module_idx) {
  const EngramTables::Table& table = tables_->tables[static_cast<size_t>(module_idx)];
  const engram::LayerHash& layer = tables_->hasher.layer(module_idx);
  const size_t width = static_cast<size_t>(tables_->hasher.shape().head_dim);
  const size_t scales = width / 32;
  const size_t count = windows_.size() * columns_.size();
  values_.assign(count * width, 0);
  scales_.assign(count * scales, 127);
  std::vector<uint32_t> buckets(columns_.size());
  for (size_t t = 0; t < windows_.size(); ++t) {
    if (!windows_[t].live) continue;
    tables_->hasher.Buckets(module_idx, windows_[t], columns_, buckets);
    for (size_t c = 0; c < columns_.size(); ++c) {
      const uint64_t row = layer.offsets[static_cast<size_t>(columns_[c])] + buckets[c];
      const size_t at = t * columns_.size() + c;
      std::memcpy(values_.data() + at * width, table.values.data() + row * width, width);
      std::memcpy(scales_.data() + at * scales, table.scales.data() + row * scales, scales);
    }
  }
  return EngramRows{values_.data(), scales_.data()};
}

std::vector<uint64_t> MemoryRowSource::RowNumbers(int module_idx) const {
  const size_t columns = static_cast<size_t>(tables_->hasher.shape().num_columns());
  std::vector<uint64_t> rows(windows_.size() * columns);
  for (size_t t = 0; t < windows_.size(); ++t)
    tables_->hasher.Rows(module_idx, windows_[t], std::span(rows).subspan(t * columns, columns));
  return rows;
}

}  // namespace twinspark::golden
