// What a rank will need, added up before anything is allocated: weights, pages of the shared
// caches, window rings, the workspace of a step. Fills in the limits that the gateway left to the
// worker (0) and refuses what does not fit, with need, have and the setting to change. Pure; any
// thread.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"

#include "common/host_memory.h"
#include "common/model_config.h"
#include "common/safetensors.h"
#include "shard_worker/model/model.h"
#include "shard_worker/runtime/worker_backend.h"

namespace twinspark {

struct MemoryRequest {
  int world = 1;
  Numerics numerics = Numerics::kBf16;
  bool f16_copy = false;
  GroupLimits wanted;         // 0 = choose
  uint64_t budget_bytes = 0;  // 0 = no limit

  bool operator==(const MemoryRequest&) const = default;
};

struct MemoryPlan {
  GroupLimits granted;
  uint64_t weights_bytes = 0;
  uint64_t pages_bytes = 0;
  uint64_t rings_bytes = 0;
  uint64_t workspace_bytes = 0;
  uint64_t bytes_per_page = 0;
  uint64_t bytes_per_slot = 0;

  uint64_t total_bytes() const {
    return weights_bytes + pages_bytes + rings_bytes + workspace_bytes;
  }
};

// RESOURCE_EXHAUSTED when the smallest useful plan, or what was asked for, does not fit.
absl::StatusOr<MemoryPlan> PlanMemory(const ModelConfig& config,
                                      const Checkpoint& checkpoint,
                                      const MemoryRequest& request);

// The part that depends on the model's shape only; weights_bytes comes from outside. For tests.
absl::StatusOr<MemoryPlan> PlanMemory(const ModelConfig& config,
                                      uint64_t weights_bytes,
                                      const MemoryRequest& request);

}  // namespace twinspark
