// What a pack holds, matrix by matrix and tensor by tensor: from its headers, or from a
// configuration and a K map when the pack is not at hand. Source: model specification 2.2 and 2.3
// (layout P1), EXL3 specification 9.2.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "common/model_config.h"
#include "shard_worker/budget/k_map.h"

namespace twinspark {

// Sizes of `vision_config`, which the text model does not need.
struct VisionShape {
  int num_layers = 0;  // 0: no vision tower
  int hidden = 0;
  int intermediate = 0;
  int patch = 0;
  int downsample = 0;
};

struct InventoryItem {
  std::string name;  // of the matrix without ".trellis", or of the native tensor
  int64_t in = 0;    // EXL3 matrices only
  int64_t out = 0;
  int bits = 0;       // K; 0 = native
  int64_t bytes = 0;  // as stored, trellis and vectors and marker together

  bool packed() const { return bits > 0; }
};

absl::StatusOr<VisionShape> ParseVisionShape(const std::string& config_json);

// The P1 pack that `config` and `map` describe.
absl::StatusOr<std::vector<InventoryItem>> InventoryFromKMap(const ModelConfig& config,
                                                             const VisionShape& vision,
                                                             const KMap& map);

// What the headers of the checkpoint in `dir` say; Engram tables are left out (they are not
// resident).
absl::StatusOr<std::vector<InventoryItem>> InventoryFromHeaders(const std::string& dir);

// One line per matrix whose K differs from the map.
std::vector<std::string> CompareWithKMap(const std::vector<InventoryItem>& items, const KMap& map);

}  // namespace twinspark
