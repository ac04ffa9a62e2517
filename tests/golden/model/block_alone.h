// Runs single blocks from stored inputs (model vectors' README, section 5): streams and carried
// weights entering the block, and for blocks that do not own them the compressed rows, keys and
// selections of their sources.
#pragma once

#include <string>

#include "absl/status/status.h"

#include "tests/golden/model/golden_case.h"
#include "tests/golden/model/model_group.h"
#include "tests/golden/model/tensor_collector.h"

namespace twinspark::golden {

// Whether the case stores what block `layer` (or, with `engram`, only its Engram step) starts from.
bool HasBlockInputs(const GoldenCase& c, const ModelConfig& config, int layer);

// Runs it on one rank; `open` is the case's sequence in slot 0. What it makes goes to the model's
// observer. The Engram step runs alone from the block before, when the layer has one.
absl::Status RunBlockAlone(
    GoldenDirectory& directory, const GoldenCase& c, int layer, bool engram_only, Model& model);

}  // namespace twinspark::golden
