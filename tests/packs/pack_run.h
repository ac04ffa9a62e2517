// A short greedy run of a checkpoint, with logprobs, so that two layouts of the same numbers can be
// compared.
#pragma once

#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "shard_worker/model/model.h"

namespace twinspark::packs {

struct PackRun {
  std::vector<int32_t> tokens;
  std::vector<TokenLogprobs> logprobs;  // per token
  std::vector<int32_t> drafts;          // of every round, one after the other
  bool has_drafts = false;
};

// Prompt of 40 fixed ids, then 12 tokens. Load errors are returned.
absl::StatusOr<PackRun> RunPack(const std::string& dir, Numerics numerics);

}  // namespace twinspark::packs
