// The small synthetic model that unit tests of the row service share: two layers of twelve columns
// with `bucket_start` rows or a little more each, rows of 264 bytes as in the released model, every
// byte known from its row number (store/synthetic.h).
#pragma once

#include <cstdint>
#include <string>

#include "absl/status/status.h"

#include "engram_service/store/hash_params.h"

namespace twinspark::engram {

EngramShape SmallShape(uint64_t bucket_start = 150);

// Checkpoint, config.json and token map of that shape.
absl::Status WriteSmallModel(const std::string& dir, uint64_t bucket_start = 150);

}  // namespace twinspark::engram
