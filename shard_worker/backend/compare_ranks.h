// What the ranks of a group compare while they join, before any of them computes: facts that must
// be equal, a sum that must be right, and the rows of their Engram tables. All ranks call the same
// functions in the same order; all of them get the same verdict, each with its own and the other
// value in the text. Not thread-safe.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "shard_worker/parallel/communicator.h"

namespace twinspark {

struct RankFact {
  const char* name = "";
  std::string value;  // at most 95 bytes
};
// FAILED_PRECONDITION names the first fact that differs.
absl::Status CompareFacts(Communicator& communicator, std::span<const RankFact> facts);

// Sums a known vector: ABORTED when the sum is wrong. The result says whether `vote` was true on
// any rank.
absl::StatusOr<bool> TestGroup(Communicator& communicator, bool vote);

// By Engram layer and column of the whole table: 16 bytes that follow from sampled rows, or an
// empty string where this rank's row service knows none.
using RowSamples = std::vector<std::vector<std::string>>;

// `num_columns`: of each layer, the same on all ranks; `samples` may have fewer, or none.
// FAILED_PRECONDITION when two ranks know different rows of one column: their tables are not the
// same, and each half of an answer's rows would come from another table. Columns that only one rank
// knows cannot be compared; if that is every column of a layer, a warning says so.
absl::Status CompareRowSamples(Communicator& communicator,
                               const RowSamples& samples,
                               std::span<const int> layer_ids,
                               int num_columns);

}  // namespace twinspark
