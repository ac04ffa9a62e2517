// One record of fixed size per rank goes round in each comparison.
#include "shard_worker/backend/compare_ranks.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

#include "common/check.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace twinspark {
namespace {

constexpr size_t kFactBytes = 96;
constexpr size_t kSampleBytes = 16;

using Sample = std::span<const char, kSampleBytes>;

bool IsKnown(Sample sample) {
  return std::any_of(sample.begin(), sample.end(), [](char byte) { return byte != 0; });
}

std::string Hex(Sample sample) {
  return absl::BytesToHexString(absl::string_view(sample.data(), kSampleBytes / 2));
}

absl::StatusOr<std::vector<char>> Gather(Communicator& communicator, std::span<const char> mine) {
  std::vector<char> all(mine.size() * static_cast<size_t>(communicator.world()));
  RETURN_IF_ERROR(
      communicator.AllGather(std::as_bytes(mine), std::as_writable_bytes(std::span<char>(all))));
  return all;
}

}  // namespace

absl::Status CompareFacts(Communicator& communicator, std::span<const RankFact> facts) {
  std::vector<char> mine(facts.size() * kFactBytes);
  for (size_t i = 0; i < facts.size(); ++i) {
    std::memcpy(&mine[i * kFactBytes], facts[i].value.data(),
                std::min(facts[i].value.size(), kFactBytes - 1));
  }
  ASSIGN_OR_RETURN(const std::vector<char> all, Gather(communicator, mine));
  for (int rank = 0; rank < communicator.world(); ++rank) {
    for (size_t i = 0; i < facts.size(); ++i) {
      const char* theirs = &all[static_cast<size_t>(rank) * mine.size() + i * kFactBytes];
      if (std::strcmp(theirs, &mine[i * kFactBytes]) == 0) continue;
      return absl::FailedPreconditionError(
          absl::StrCat(facts[i].name, " differs: rank ", communicator.rank(), " has ",
                       &mine[i * kFactBytes], ", rank ", rank, " has ", theirs));
    }
  }
  return absl::OkStatus();
}

// The sum must be right and the same everywhere before a model depends on it.
absl::StatusOr<bool> TestGroup(Communicator& communicator, bool vote) {
  const int world = communicator.world();
  std::vector<float> sum = {static_cast<float>(communicator.rank() + 1), 0.5f, vote ? 1.0f : 0.0f};
  RETURN_IF_ERROR(communicator.AllReduceSum(sum));
  const int expected = world * (world + 1) / 2;
  if (sum[0] != static_cast<float>(expected) || sum[1] != 0.5f * static_cast<float>(world)) {
    return absl::AbortedError(
        absl::StrCat("self-test of the group: the sum is ", sum[0], ", expected ", expected));
  }
  return sum[2] != 0;
}

absl::Status CompareRowSamples(Communicator& communicator,
                               const RowSamples& samples,
                               std::span<const int> layer_ids,
                               int num_columns) {
  const size_t layer_bytes = static_cast<size_t>(num_columns) * kSampleBytes;
  std::vector<char> mine(layer_ids.size() * layer_bytes);
  CHECK_LE(samples.size(), layer_ids.size());
  for (size_t layer = 0; layer < samples.size(); ++layer) {
    CHECK_LE(samples[layer].size(), static_cast<size_t>(num_columns)) << "layer " << layer;
    for (size_t column = 0; column < samples[layer].size(); ++column) {
      const std::string& sample = samples[layer][column];
      std::memcpy(&mine[layer * layer_bytes + column * kSampleBytes], sample.data(),
                  std::min(sample.size(), kSampleBytes));
    }
  }
  ASSIGN_OR_RETURN(const std::vector<char> all, Gather(communicator, mine));
  for (size_t layer = 0; layer < layer_ids.size(); ++layer) {
    bool compared = false;
    for (size_t at = layer * layer_bytes; at < (layer + 1) * layer_bytes; at += kSampleBytes) {
      const Sample own(&mine[at], kSampleBytes);
      for (int rank = 0; rank < communicator.world() && IsKnown(own); ++rank) {
        if (rank == communicator.rank()) continue;
        const Sample theirs(&all[static_cast<size_t>(rank) * mine.size() + at], kSampleBytes);
        if (!IsKnown(theirs)) continue;
        compared = true;
        if (std::equal(own.begin(), own.end(), theirs.begin())) continue;
        return absl::FailedPreconditionError(absl::StrCat(
            "row digest differs between the Engram tables: layer ", layer_ids[layer], " column ",
            at % layer_bytes / kSampleBytes, ": rank ", communicator.rank(), " has ", Hex(own),
            ", rank ", rank, " has ", Hex(theirs),
            "; give both machines the tables of one checkpoint (verify_rows --mode source-full "
            "compares packed ones with it)"));
      }
    }
    if (!compared && communicator.world() > 1) {
      LOG_WARNING << "the Engram tables of the ranks were not compared layer=" << layer_ids[layer]
                  << ": no column is known to two of them; run pack_rows again, which then only "
                     "adds what was sampled from the source";
    }
  }
  return absl::OkStatus();
}

}  // namespace twinspark
