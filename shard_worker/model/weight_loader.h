// Fills ModelWeights from a checkpoint: the three EXL3 pack layouts and plain BF16 / FP8 / FP4, by
// one rule (end of model specification 2.3): every logical matrix is X.trellis else X.weight
// (+ X.scale), wo_a is wo_a.slice.g or wo_a.weight, the head is head.* or lm_head.*; *.ape is
// ignored, anything else unknown is refused by name. Slices for tensor parallelism are cut while
// reading (specification 5.2), so a rank never holds more than its share.
#pragma once

#include <cstdint>

#include "absl/status/statusor.h"

#include "common/model_config.h"
#include "common/safetensors.h"
#include "shard_worker/model/model.h"
#include "shard_worker/model/weights.h"

namespace twinspark {

struct LoadedWeights {
  ModelWeights weights;
  uint64_t replicated_digest = 0;  // content of what every rank holds whole
  uint64_t slices_digest = 0;      // content of this rank's slices
};

absl::StatusOr<LoadedWeights> LoadWeights(const Checkpoint& checkpoint,
                                          const ModelConfig& config,
                                          const ModelOptions& options,
                                          const LoadProgressCallback& progress);

// 2 when one rank must give the bits of two (the model could be split over two ranks), else 1.
int NumPartials(const ModelConfig& config, int world);

}  // namespace twinspark
