// Opening and addressing of the native layout. The scale tensor has to lie in the weight tensor's
// file, as in every published checkpoint; a directory that splits them is refused by name.
#include "engram_service/store/native_table.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"

namespace twinspark::engram {
namespace {

constexpr size_t kMaxIndexBytes = size_t{64} << 20;

absl::StatusOr<const StoredTensor*> FindTensor(const Checkpoint& checkpoint,
                                               const std::string& name,
                                               StoredType type,
                                               uint64_t rows,
                                               int64_t width) {
  const StoredTensor* tensor = checkpoint.Find(name);
  if (tensor == nullptr) {
    return absl::NotFoundError(
        absl::StrCat(checkpoint.dir(), " has no tensor ", name,
                     "; set ENGRAM_DIR to the directory that holds the Engram tables"));
  }
  const std::vector<int64_t> want = {static_cast<int64_t>(rows), width};
  if (tensor->type != type || tensor->shape != want) {
    return absl::DataLossError(absl::StrCat(name, " in ", checkpoint.file(tensor->file_idx).path(),
                                            " is ", StoredTypeName(tensor->type), " ",
                                            tensor->ShapeText(), "; config.json implies ",
                                            StoredTypeName(type), " [", rows, ", ", width, "]"));
  }
  return tensor;
}

}  // namespace

uint64_t Generation(const Sha256Digest& index_digest,
                    const Sha256Digest& header_digest,
                    int layer_id) {
  Sha256 hash;
  hash.Update(index_digest);
  hash.Update(header_digest);
  hash.UpdateU32(static_cast<uint32_t>(layer_id));
  const Sha256Digest digest = hash.Finish();
  uint64_t value = 0;
  for (size_t i = 0; i < 8; ++i)
    value |= static_cast<uint64_t>(digest[i]) << (8 * i);
  return value;
}

absl::StatusOr<std::unique_ptr<NativeTable>> NativeTable::Open(const Checkpoint& checkpoint,
                                                               const EngramShape& shape,
                                                               const LayerHash& layer,
                                                               bool direct) {
  const std::string name = absl::StrCat("layers.", layer.layer_id, ".engram.embed.");
  ASSIGN_OR_RETURN(const StoredTensor* weight,
                   FindTensor(checkpoint, name + "weight", StoredType::kF8E4M3, layer.num_rows,
                              shape.row_weight_bytes()));
  ASSIGN_OR_RETURN(const StoredTensor* scale,
                   FindTensor(checkpoint, name + "scale", StoredType::kF8E8M0, layer.num_rows,
                              shape.row_scale_bytes()));
  if (weight->file_idx != scale->file_idx) {
    return absl::DataLossError(absl::StrCat(
        name, "weight and ", name, "scale are in ", checkpoint.file(weight->file_idx).path(),
        " and ", checkpoint.file(scale->file_idx).path(), "; expected one file"));
  }
  const SafetensorsFile& file = checkpoint.file(weight->file_idx);
  std::unique_ptr<NativeTable> table(new NativeTable);
  table->layer_id_ = layer.layer_id;
  table->num_rows_ = layer.num_rows;
  table->row_weight_bytes_ = static_cast<uint32_t>(shape.row_weight_bytes());
  table->row_scale_bytes_ = static_cast<uint32_t>(shape.row_scale_bytes());
  ASSIGN_OR_RETURN(TableFile opened, OpenTableFile(file.path(), direct));
  table->files_.push_back(std::move(opened));
  table->weight_offset_ = static_cast<uint64_t>(weight->offset);
  table->scale_offset_ = static_cast<uint64_t>(scale->offset);
  table->offsets_ = layer.offsets;

  const std::string index_path = checkpoint.dir() + "/model.safetensors.index.json";
  if (FileExists(index_path)) {
    ASSIGN_OR_RETURN(const std::vector<uint8_t> index, ReadWholeFile(index_path, kMaxIndexBytes));
    table->index_digest_ = Sha256Of(index);
  }
  Sha256 header_hash;
  header_hash.UpdateU64(file.header().size());
  header_hash.Update(
      std::span(reinterpret_cast<const uint8_t*>(file.header().data()), file.header().size()));
  table->header_digest_ = header_hash.Finish();
  Sha256 identity;
  identity.Update(table->index_digest_);
  identity.Update(table->header_digest_);
  identity.UpdateU32(static_cast<uint32_t>(layer.layer_id));
  table->digest_ = identity.Finish();
  table->ContentFromFiles();
  return table;
}

RowPlace NativeTable::Locate(int column, uint32_t bucket) const {
  const uint64_t row = offsets_[static_cast<size_t>(column)] + bucket;
  RowPlace place;
  place.num_pieces = 2;
  place.pieces[0] = {weight_offset_ + row * row_weight_bytes_,
                     static_cast<uint16_t>(row_weight_bytes_), 0};
  place.pieces[1] = {scale_offset_ + row * row_scale_bytes_,
                     static_cast<uint16_t>(row_scale_bytes_),
                     static_cast<uint16_t>(row_weight_bytes_)};
  return place;
}

}  // namespace twinspark::engram
