// Ranks as threads (model_group.h).
#include "tests/golden/model/model_group.h"

#include <algorithm>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/limits.h"
#include "common/status_macros.h"
#include "shard_worker/parallel/local_communicator.h"

namespace twinspark::golden {
namespace {

constexpr int64_t kPeerTimeoutMs = 60000;

}  // namespace

absl::StatusOr<std::unique_ptr<ModelGroup>> ModelGroup::Load(const std::string& dir,
                                                             const ModelOptions& options,
                                                             int threads_per_rank) {
  auto group = std::make_unique<ModelGroup>();
  ASSIGN_OR_RETURN(std::shared_ptr<const EngramTables> tables, EngramTables::Load(dir));
  std::vector<std::unique_ptr<Communicator>> communicators =
      MakeLocalGroup(options.world, kPeerTimeoutMs);
  for (int rank = 0; rank < options.world; ++rank) {
    Rank r;
    r.pool = std::make_unique<ThreadPool>(threads_per_rank);
    ModelOptions mine = options;
    mine.rank = rank;
    ASSIGN_OR_RETURN(r.model, Model::Load(dir, mine, *r.pool));
    r.rows = std::make_unique<MemoryRowSource>(tables, rank, options.world);
    r.communicator = std::move(communicators[static_cast<size_t>(rank)]);
    group->ranks_.push_back(std::move(r));
  }
  RETURN_IF_ERROR(group->BeginEpoch());
  return group;
}

absl::Status ModelGroup::OnAllRanks(const std::function<absl::Status(int, Model&)>& fn) {
  if (world() == 1) return fn(0, model());
  std::vector<absl::Status> statuses(ranks_.size());
  std::vector<std::thread> threads;
  for (size_t r = 0; r < ranks_.size(); ++r)
    threads.emplace_back([&, r] {
      statuses[r] = fn(static_cast<int>(r), *ranks_[r].model);
      if (!statuses[r].ok()) ranks_[r].communicator->Abort();
    });
  for (std::thread& thread : threads)
    thread.join();
  for (const absl::Status& status : statuses)
    RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::Status ModelGroup::BeginEpoch() {
  for (Rank& rank : ranks_)
    RETURN_IF_ERROR(rank.model->BeginEpoch(rank.communicator.get(), rank.rows.get()));
  return absl::OkStatus();
}

absl::Status ModelGroup::Open(const OpenSequence& open, int64_t max_length) {
  const ModelLimits& limits = model().options().limits;
  const int64_t pages_per_slot = limits.num_pages / limits.num_slots;
  const int64_t num_pages = (max_length + limits::kPageTokens - 1) / limits::kPageTokens;
  if (num_pages > pages_per_slot)
    return absl::InvalidArgumentError(absl::StrCat(max_length, " positions need ", num_pages,
                                                   " pages, a slot has ", pages_per_slot));
  std::vector<PageMapping> pages;
  for (int64_t page = 0; page < num_pages; ++page)
    pages.push_back(
        {static_cast<int32_t>(page), static_cast<int32_t>(open.slot * pages_per_slot + page)});
  for (Rank& rank : ranks_) {
    RETURN_IF_ERROR(rank.model->Open(open));
    RETURN_IF_ERROR(rank.model->MapPages(open.slot, pages));
  }
  return absl::OkStatus();
}

absl::Status ModelGroup::Close(int slot) {
  for (Rank& rank : ranks_)
    RETURN_IF_ERROR(rank.model->Close(slot));
  return absl::OkStatus();
}

absl::StatusOr<StepResult> ModelGroup::RunStep(const StepPlan& plan) {
  std::vector<StepResult> results(ranks_.size());
  RETURN_IF_ERROR(OnAllRanks([&](int rank, Model& m) -> absl::Status {
    ASSIGN_OR_RETURN(results[static_cast<size_t>(rank)], m.RunStep(plan));
    return absl::OkStatus();
  }));
  for (const StepResult& result : results) {
    bool same = result.residual_digest == results[0].residual_digest;
    for (size_t i = 0; i < result.sequences.size(); ++i)
      same = same && result.sequences[i].tokens == results[0].sequences[i].tokens &&
             result.sequences[i].drafts == results[0].sequences[i].drafts;
    if (!same) return absl::InternalError("ranks disagree about a step");
  }
  return results[0];
}

absl::StatusOr<SequenceResult> ModelGroup::Prefill(
    int slot, int64_t begin, int64_t end, int64_t chunk, bool draft_next) {
  SequenceResult last;
  for (int64_t at = begin; at < end; at += chunk) {
    StepPlan plan;
    plan.prefill.push_back({slot, at, std::min(end, at + chunk), draft_next, -1});
    ASSIGN_OR_RETURN(StepResult result, RunStep(plan));
    last = std::move(result.sequences[0]);
  }
  return last;
}

absl::StatusOr<SequenceResult> ModelGroup::Round(int slot, int num_drafts, bool draft_next) {
  StepPlan plan;
  RoundSequence round;
  round.slot = slot;
  round.after_previous = true;
  round.num_drafts = num_drafts;
  round.draft_next = draft_next;
  plan.round.push_back(round);
  ASSIGN_OR_RETURN(StepResult result, RunStep(plan));
  return std::move(result.sequences[0]);
}

}  // namespace twinspark::golden
