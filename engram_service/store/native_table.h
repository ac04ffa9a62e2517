// A layer's table as the checkpoint stores it: a weight tensor F8_E4M3 [rows, head_dim] and a scale
// tensor F8_E8M0 [rows, head_dim / 32] in one safetensors file. Two pieces per row, no checksums.
// Found through model.safetensors.index.json of the table directory. Spec: engram.md 3.1.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "common/safetensors.h"
#include "engram_service/store/hash_params.h"
#include "engram_service/store/row_table.h"

namespace twinspark::engram {

class NativeTable : public RowTable {
 public:
  // Checks dtypes, shapes and offsets against the configuration. `direct`: past the page cache.
  static absl::StatusOr<std::unique_ptr<NativeTable>> Open(const Checkpoint& checkpoint,
                                                           const EngramShape& shape,
                                                           const LayerHash& layer,
                                                           bool direct);

  std::string_view tier() const override { return "native"; }
  bool HasColumn(int column) const override {
    return column >= 0 && static_cast<size_t>(column) < offsets_.size();
  }
  RowPlace Locate(int column, uint32_t bucket) const override;
  absl::Status CheckBlock(uint64_t, std::span<const uint8_t>) const override {
    return absl::OkStatus();
  }

  uint64_t weight_offset() const { return weight_offset_; }
  uint64_t scale_offset() const { return scale_offset_; }
  // SHA-256 of the index file and of the table file's header (8 + N bytes).
  const Sha256Digest& index_digest() const { return index_digest_; }
  const Sha256Digest& header_digest() const { return header_digest_; }

 private:
  NativeTable() = default;

  std::vector<uint64_t> offsets_;  // first row by column
  uint64_t weight_offset_ = 0;
  uint64_t scale_offset_ = 0;
  Sha256Digest index_digest_{};
  Sha256Digest header_digest_{};
};

// First 8 bytes of SHA-256(index digest, header digest, u32 layer), as a little-endian number: the
// identity that packed pages repeat (engram.md 3.3).
uint64_t Generation(const Sha256Digest& index_digest,
                    const Sha256Digest& header_digest,
                    int layer_id);

}  // namespace twinspark::engram
