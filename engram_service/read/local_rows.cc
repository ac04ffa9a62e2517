// Starts one job and polls the engine until every layer has been reported.
#include "engram_service/read/local_rows.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "engram_service/io/inline_reader.h"

namespace twinspark::engram {
namespace {

constexpr size_t kInlineDepth = 64;

}  // namespace

absl::Status AppendWindows(const Hasher& hasher,
                           const SequenceView& sequence,
                           std::vector<Window>& windows) {
  const uint32_t want = std::min<uint32_t>(
      sequence.position, static_cast<uint32_t>(hasher.shape().max_ngram_size - 1));
  if (sequence.num_history != want || sequence.ids.size() < want) {
    return absl::InvalidArgumentError(absl::StrCat("position ", sequence.position, " comes with ",
                                                   sequence.num_history, " history ids; expected ",
                                                   want));
  }
  const size_t first = windows.size();
  windows.resize(first + sequence.ids.size() - want);
  return hasher.Windows(sequence.ids, want, sequence.dead, std::span(windows).subspan(first));
}

absl::StatusOr<std::unique_ptr<LocalRows>> LocalRows::Open(const TableSetOptions& options) {
  ASSIGN_OR_RETURN(auto tables, TableSet::Open(options));
  auto rows = Over(*tables);
  rows->owned_tables_ = std::move(tables);
  return rows;
}

std::unique_ptr<LocalRows> LocalRows::Over(const TableSet& tables) {
  std::unique_ptr<LocalRows> rows(new LocalRows);
  rows->tables_ = &tables;
  rows->reader_ = std::make_unique<InlineReader>(kInlineDepth);
  rows->engine_ = std::make_unique<GatherEngine>(tables, *rows->reader_);
  return rows;
}

absl::Status LocalRows::Gather(std::span<const SequenceView> sequences) {
  GatherJob job;
  for (const SequenceView& sequence : sequences) {
    RETURN_IF_ERROR(AppendWindows(tables_->hasher(), sequence, job.windows));
  }
  const size_t rows = job.windows.size() * tables_->columns().size();
  for (int i = 0; i < tables_->num_layers(); ++i) {
    LayerBytes& bytes = rows_[static_cast<size_t>(i)];
    bytes.weights.resize(rows * tables_->table(i).row_weight_bytes());
    bytes.scales.resize(rows * tables_->table(i).row_scale_bytes());
    job.destinations[static_cast<size_t>(i)] = {bytes.weights.data(), bytes.scales.data()};
    job.layers |= 1u << i;
  }
  absl::Status result;
  job.done = [&result](int, GatherStatus status, const std::string& error) {
    if (status != GatherStatus::kOk) result.Update(absl::DataLossError(error));
  };
  engine_->Start(std::move(job));
  while (!engine_->idle())
    engine_->Poll(/*wait=*/true);
  return result;
}

}  // namespace twinspark::engram
