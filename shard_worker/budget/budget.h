// Bytes of a model by part: in the pack, and held by each rank. Two countings: `held` is what a
// rank keeps (a split matrix halves its trellis and the vector of the split axis; the other vector
// stays whole), `kit` is how the serving kit's script counts (every sharded tensor halved with its
// vectors, wo_b and Engram wkv whole), kept so that its published figure can be reproduced. Source:
// model specification 5.2, EXL3 specification 9.3.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/model_config.h"
#include "shard_worker/budget/inventory.h"

namespace twinspark {

struct BudgetPart {
  std::string name;
  int64_t num_matrices = 0;
  int64_t num_natives = 0;
  int64_t weights = 0;  // elements of packed matrices
  int64_t trellis_bits = 0;
  int64_t total_bytes = 0;
  int64_t kit_bytes = 0;   // per rank
  int64_t held_bytes = 0;  // per rank

  double bits_per_weight() const {
    return weights == 0 ? 0 : static_cast<double>(trellis_bits) / static_cast<double>(weights);
  }
};

struct Budget {
  int world = 1;
  std::vector<BudgetPart> parts;
  BudgetPart total;
  int64_t num_tensors = 0;              // in the pack: four a matrix, one a native
  double kv_bytes_per_token = 0;        // packed FP4 rows and index keys, per rank (replicated)
  int64_t ring_bytes_per_sequence = 0;  // FP8 window rings of backbone and draft stages
};

Budget ComputeBudget(const ModelConfig& config, const std::vector<InventoryItem>& items, int world);

// Tokens of KV state that fit into `memory_bytes` of a rank beside weights, `reserve_bytes` and the
// rings of `slots`; 0 when none.
int64_t TokensThatFit(const Budget& budget, int64_t memory_bytes, int64_t reserve_bytes, int slots);

}  // namespace twinspark
