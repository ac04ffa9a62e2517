// The cost table of an epoch, measured in JOINING: see MeasureCosts in model_backend.h. The gateway
// predicts deadlines and chunk sizes from it, so shapes are the ones it plans with: decode rounds
// of a few sizes and prefills. It is also the warm-up: caches, rings and the row service have been
// used once before READY.
#include <algorithm>
#include <chrono>
#include <vector>

#include "common/limits.h"
#include "common/status_macros.h"
#include "shard_worker/backend/model_backend.h"

namespace twinspark {
namespace {

constexpr int kPromptRows = 64;  // one page per measured slot
constexpr int kRepeats = 3;

class CostMeasurer {
 public:
  CostMeasurer(WorkerBackend& backend, int vocab_size)
      : backend_(backend), vocab_size_(vocab_size) {}

  // Opens a slot with `rows` made-up ids and the pages for them and a few rounds.
  absl::Status Open(int slot, int rows) {
    OpenSequence open;
    open.slot = slot;
    for (int i = 0; i < rows; ++i)
      open.ids.push_back((slot * 131 + i * 7 + 11) % vocab_size_);
    open.num_prompt_ids = rows;
    RETURN_IF_ERROR(backend_.Open(open));
    std::vector<PageMapping> pages;
    const int num_pages = (rows + kPromptRows + limits::kPageTokens - 1) / limits::kPageTokens;
    for (int page = 0; page < num_pages; ++page)
      pages.push_back({page, next_page_++});
    return backend_.MapPages(slot, pages);
  }

  absl::Status Prefill(int slot, int rows) {
    StepPlan plan;
    plan.prefill = {{slot, 0, rows, false, -1}};
    return Timed(plan, StepCost::Kind::kPrefill, rows);
  }

  absl::Status Round(int num_slots, int num_drafts, bool draft_next) {
    StepPlan plan;
    for (int slot = 0; slot < num_slots; ++slot) {
      RoundSequence round;
      round.slot = slot;
      round.after_previous = true;
      round.num_drafts = num_drafts;
      round.kept_drafts = false;
      for (int i = 0; i < num_drafts; ++i)
        round.drafts.push_back((i * 17 + 5) % vocab_size_);
      round.draft_next = draft_next;
      plan.round.push_back(std::move(round));
    }
    return Timed(plan, StepCost::Kind::kRound, num_slots * (1 + num_drafts));
  }

  std::vector<StepCost> Take() { return std::move(costs_); }
  int pages_used() const { return next_page_; }

 private:
  absl::Status Timed(const StepPlan& plan, StepCost::Kind kind, int rows) {
    const auto start = std::chrono::steady_clock::now();
    RETURN_IF_ERROR(backend_.RunStep(plan).status());
    const double us =
        std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
    const auto same = std::find_if(costs_.begin(), costs_.end(), [&](const StepCost& cost) {
      return cost.kind == kind && cost.rows == rows;
    });
    // The quickest of the repeats: the first one pays for cold caches.
    if (same == costs_.end()) {
      costs_.push_back({kind, rows, us});
    } else {
      same->microseconds = std::min(same->microseconds, us);
    }
    return absl::OkStatus();
  }

  WorkerBackend& backend_;
  const int vocab_size_;
  int next_page_ = 0;
  std::vector<StepCost> costs_;
};

}  // namespace

absl::StatusOr<std::vector<StepCost>> MeasureCosts(WorkerBackend& backend,
                                                   const GroupLimits& limits,
                                                   int vocab_size,
                                                   int max_drafts) {
  CostMeasurer measurer(backend, vocab_size);
  const int slots = std::min({4, limits.num_slots, limits.num_pages / 2});
  if (slots < 1 || limits.max_context < 2 * kPromptRows) return std::vector<StepCost>();
  for (int slot = 0; slot < slots; ++slot) {
    RETURN_IF_ERROR(measurer.Open(slot, kPromptRows));
    RETURN_IF_ERROR(measurer.Prefill(slot, kPromptRows));
  }
  const int drafts = std::min(3, max_drafts);
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    RETURN_IF_ERROR(measurer.Round(1, 0, false));
    RETURN_IF_ERROR(measurer.Round(1, drafts, drafts > 0));
    RETURN_IF_ERROR(measurer.Round(slots, drafts, drafts > 0));
  }
  const int long_rows = std::min(256, limits.max_short_prefill_rows);
  const int pages_needed = (long_rows + kPromptRows) / limits::kPageTokens + 1;
  if (limits.num_slots > slots && limits.num_pages - measurer.pages_used() >= pages_needed &&
      limits.max_context >= long_rows + kPromptRows && long_rows > kPromptRows) {
    RETURN_IF_ERROR(measurer.Open(slots, long_rows));
    RETURN_IF_ERROR(measurer.Prefill(slots, long_rows));
  }
  return measurer.Take();
}

}  // namespace twinspark
