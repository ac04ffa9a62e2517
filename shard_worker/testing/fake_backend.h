// A WorkerBackend with no weights: its "model" emits the token (sum of all ids so far * 31 +
// position) mod vocabulary, and drafts the right tokens except that every third draft is wrong. It
// keeps slots like the real one (positions, pages, masks) and fails on command. For tests of the
// worker's machinery.
#pragma once

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "shard_worker/runtime/worker_backend.h"

namespace twinspark {

class FakeBackend : public WorkerBackend {
 public:
  static constexpr int kVocab = 1000;
  static constexpr int kLayers = 4;
  static constexpr int kMaxDrafts = 5;

  // Set before the call that they concern; read on other threads.
  std::atomic<int> step_ms{0};    // every step takes so long (aborts shorten it)
  std::atomic<bool> hang{false};  // a step ends only when aborted, and then fails
  std::atomic<bool> deaf{false};  // ... and not even then, for step_ms
  std::atomic<bool> non_finite{false};
  std::atomic<bool> row_service_lost{false};  // what the idle tick is told
  void FailNextStep(const absl::Status& status);
  void FailNextLoad(const absl::Status& status);
  void FailNextJoin(const absl::Status& status);

  std::atomic<int> loads{0};  // cold ones
  std::atomic<int> joins{0};
  std::atomic<int> leaves{0};
  std::atomic<int> faults{0};

  // The token that follows `ids`.
  static int32_t NextToken(const std::vector<int32_t>& ids);

  BackendFacts Facts() const override;
  std::string ResidentWeightsDigest() const override;
  std::string ResidentConfigDigest() const override;
  RowServiceFacts RowService() const override;
  absl::Status CheckRowService() override;
  int LayersDone() const override { return layers_done_.load(); }
  void Abort() override { aborted_.store(true); }
  absl::StatusOr<std::string> PrepareGroup(uint64_t epoch, int rank, int world) override;
  absl::StatusOr<LoadReport> Load(const GroupConfig& config, const LoadObserver& observer) override;
  absl::StatusOr<std::vector<StepCost>> Join(const GroupConfig& config,
                                             const LoadReport& report) override;
  void Leave() override;
  void Unload() override;
  absl::Status Open(const OpenSequence& open) override;
  absl::Status SetSampling(int slot, const SamplingParams& sampling) override;
  absl::Status MapPages(int slot, std::span<const PageMapping> pages) override;
  absl::Status Truncate(int slot, int64_t length) override;
  absl::Status Close(int slot) override;
  absl::Status SetMask(int32_t mask_id, std::span<const uint8_t> bits) override;
  absl::StatusOr<StepResult> RunStep(const StepPlan& plan) override;
  int64_t CommittedLength(int slot) const override;
  int SlotsInUse() const override { return static_cast<int>(slots_.size()); }
  int PagesInUse() const override;
  absl::StatusOr<std::string> Inject(const Fault& fault) override;

 private:
  struct Slot {
    std::vector<int32_t> ids;
    int64_t committed = 0;
    std::vector<int32_t> kept;
    std::set<int32_t> logical_pages;
    std::set<int32_t> physical_pages;
  };

  absl::Status TakeFailure(absl::Status& failure);
  absl::Status SpendTime();
  absl::Status CheckPages(const Slot& slot, int64_t end) const;
  std::vector<int32_t> MakeDrafts(const Slot& slot) const;
  absl::StatusOr<SequenceResult> RunRound(const RoundSequence& sequence);
  absl::StatusOr<SequenceResult> RunPrefill(const PrefillRange& range);

  mutable std::mutex mutex_;  // digests and planned failures
  std::string weights_digest_;
  std::string config_digest_;
  absl::Status next_step_;
  absl::Status next_load_;
  absl::Status next_join_;
  std::atomic<bool> aborted_{false};
  std::atomic<int> layers_done_{0};
  std::map<int, Slot> slots_;
  std::map<int32_t, std::vector<uint8_t>> masks_;
};

}  // namespace twinspark
