// The real WorkerBackend: Model on the CPU, a TCP group of ranks, and the row service of this node.
// Owns the pool of compute threads and the weights, which outlive epochs. Rows may come from
// somewhere else (RowConnector), so that tests need no row service.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "kernels/thread_pool.h"
#include "shard_worker/backend/compare_ranks.h"
#include "shard_worker/backend/memory_plan.h"
#include "shard_worker/backend/watched.h"
#include "shard_worker/model/model.h"
#include "shard_worker/parallel/tcp_communicator.h"
#include "shard_worker/runtime/worker_backend.h"

namespace twinspark {

// A connection to where rows come from, for one epoch.
struct RowConnection {
  std::unique_ptr<RowSource> source;
  std::function<RowServiceFacts()> facts;  // thread-safe; valid as long as the source
  std::function<absl::Status()> check;     // whether it still lives; may be empty
  RowSamples samples;                      // of the whole tables, to compare with other ranks
  std::function<void()> accepted;          // the epoch will use these rows; may be empty
};
using RowConnector = std::function<absl::StatusOr<RowConnection>(
    const ModelConfig& model, const GroupConfig& group, int max_step_rows)>;

// The row service at GroupConfig::engram_endpoint.
RowConnector RowServiceConnector();

class ModelBackend : public WorkerBackend {
 public:
  struct Options {
    std::string advertise_host = "127.0.0.1";  // where the other ranks reach this one
    int num_threads = 0;                       // 0 = cores of this machine
    std::string simd_target;                   // pinned by a setting; "" = what the group agrees on
    bool f16_copy = false;
    std::string model_dir;  // of this host, where paths differ; "" = what Configure says
    std::string engram_dir;
    uint64_t memory_budget_bytes = 0;  // 0 = what the host says is available
    bool measure_costs = true;
    int64_t join_wait_ms = 600'000;  // for the slowest rank to load
  };

  ModelBackend(const Options& options, RowConnector connect_rows);
  ~ModelBackend() override;

  BackendFacts Facts() const override;
  std::string ResidentWeightsDigest() const override;
  std::string ResidentConfigDigest() const override;
  RowServiceFacts RowService() const override;
  absl::Status CheckRowService() override;
  int LayersDone() const override { return layers_done_.load(); }
  void Abort() override;

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
  int SlotsInUse() const override;
  int PagesInUse() const override;
  absl::StatusOr<std::string> Inject(const Fault& fault) override;

 private:
  absl::Status Plan(const GroupConfig& config, uint64_t* checkpoint_digest);
  bool IsResident(const GroupConfig& config, const ModelOptions& wanted, uint64_t weights) const;
  absl::StatusOr<LoadReport> LoadCold(const GroupConfig& config,
                                      const ModelOptions& options,
                                      const LoadObserver& observer);
  void FillReport(LoadReport& report) const;
  absl::Status ConnectGroup(const GroupConfig& config);
  absl::Status CompareWithRanks(const LoadReport& report);
  absl::Status FlipCachedRow(const Fault& fault, std::string& what);

  const Options options_;
  const RowConnector connect_rows_;
  const std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Model> model_;
  std::string resident_dir_;
  std::string resident_engram_dir_;
  MemoryRequest planned_for_;
  MemoryPlan plan_;
  std::vector<StepCost> costs_;  // measured once per load, by all ranks together

  std::atomic<bool> aborted_{false};
  std::atomic<int> layers_done_{0};

  mutable std::mutex mutex_;  // what other threads than the epoch's own look at
  std::string weights_digest_;
  std::string config_digest_;
  RowServiceFacts last_rows_;  // of the epoch before, once it is over
  std::unique_ptr<TcpListener> listener_;
  std::unique_ptr<WatchedCommunicator> communicator_;
  RowConnection rows_;
  std::unique_ptr<WatchedRows> watched_rows_;
};

// Runs a few shapes of steps on slot 0.. and times them; leaves sequences behind (BeginEpoch clears
// them). Every rank runs the same shapes, whatever they take.
absl::StatusOr<std::vector<StepCost>> MeasureCosts(WorkerBackend& backend,
                                                   const GroupLimits& limits,
                                                   int vocab_size,
                                                   int max_drafts);

}  // namespace twinspark
