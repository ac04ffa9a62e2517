// The one thread that owns the scheduler: takes requests, results and losses from its inbox, lets
// the scheduler decide, sends each op to every rank as the same bytes, compares the ranks' digests
// before a token of that op leaves, tells the requests what happened. Ends an epoch when a rank is
// lost, late, wrong or different. Source: protocol specification 2 to 4 and 8, design 3.
//
// A request holds its prompt and every emitted token (in the scheduler), so it can go on in the
// next epoch: it waits up to recovery_timeout_ms for one; 0 fails it at once with an error event.
//
// Threading: the public functions are thread-safe; everything else runs on the engine thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "common/clock.h"
#include "common/metrics.h"
#include "gateway/engine/engine_inbox.h"
#include "gateway/engine/engine_metrics.h"
#include "gateway/engine/epoch_manager.h"
#include "gateway/engine/generate_request.h"
#include "gateway/engine/worker_board.h"
#include "gateway/engine/worker_group.h"
#include "gateway/engine/worker_monitor.h"
#include "gateway/scheduler/scheduler.h"

namespace twinspark::gateway {

struct EngineConfig {
  SchedulerConfig scheduler;
  int64_t recovery_timeout_ms = 0;
  std::string model_id;
  std::vector<std::string> not_enforced;  // for /status
};

class EngineLoop : public GenerateService {
 public:
  EngineLoop(const EngineConfig& config,
             const Clock& clock,
             EngineInbox& inbox,
             EpochManager& epochs,
             WorkerMonitor& monitor,
             WorkerBoard& board,
             Metrics& metrics);
  // Fails what still runs and ends the epoch.
  ~EngineLoop() override;

  absl::StatusOr<GenerateId> Submit(GenerateRequest request,
                                    std::shared_ptr<GenerateEvents> events) override;
  void Cancel(GenerateId id) override;
  void Finish(GenerateId id) override;
  EngineStatus GetStatus() const override;

  // From now on new requests are refused. Returns when all have ended; those that have not by
  // `timeout_ms` end with an error event.
  void Drain(int64_t timeout_ms);

 private:
  // A request from Submit to its last event.
  struct Running {
    std::string request_id;
    uint64_t request_hash = 0;
    std::shared_ptr<GenerateEvents> events;
    int32_t num_prompt_tokens = 0;
    int32_t num_emitted = 0;
    bool admitted = false;
    int64_t accept_us = 0;
    int64_t admit_us = 0;
    int64_t first_token_us = 0;
    int64_t last_token_us = 0;
  };
  struct OpInFlight {
    StepPlan plan;
    int64_t start_us = 0;  // sent, or when the op before it was done
    int64_t deadline_us = 0;
    int64_t gateway_us = 0;  // what the workers waited for it, from their last result on
    std::vector<std::optional<RankResult>> results;  // by rank
  };

  void Run();
  int64_t WaitUs() const;
  void Handle(SubmitMessage message);
  void Handle(EndMessage message);
  void Handle(ResultMessage message);
  void Handle(const LostMessage& message);
  void Handle(ReadyMessage message);
  void Handle(const AbortAllMessage& message);

  void CompleteFrontOp();
  // What the thread slept since its last turn is not the workers' time: their op gets it back.
  void ExtendDeadline(int64_t turn_us);
  void CheckDeadlines();
  bool AwaitsOtherRanks() const;
  void SendSteps();
  void DeliverEvents();
  void Deliver(SequenceEvent& event, Running& running);
  void DeliverTokens(const SequenceEvent& event, Running& running);
  void EndRequest(GenerateId id,
                  const char* reason,
                  const std::function<void(GenerateEvents&)>& last_event);
  // Cause is one word for the metrics, reason a line for people.
  void EndEpoch(const std::string& cause, const std::string& reason);
  void FailRequests(const absl::Status& error);
  // What GetStatus shows, and the gauges of /metrics: from time to time, or now.
  void PublishStatus(bool force);
  void PublishMetrics(bool force);
  // Requires mutex_.
  EngineState State() const;

  const EngineConfig config_;
  const Clock& clock_;
  EngineInbox& inbox_;
  EpochManager& epochs_;
  WorkerMonitor& monitor_;
  WorkerBoard& board_;
  EngineMetrics metrics_;
  const int64_t start_us_;

  // Engine thread only.
  Scheduler scheduler_;
  std::shared_ptr<WorkerGroup> group_;  // null between epochs
  std::deque<OpInFlight> in_flight_;
  absl::flat_hash_map<GenerateId, Running> running_;
  int64_t recovery_deadline_us_ = 0;
  int64_t published_us_ = 0;
  int64_t metrics_us_ = 0;
  int64_t workers_free_us_ = 0;  // since when they wait for this turn of the loop; 0: they do not

  // Shared with the callers of the public functions.
  mutable std::mutex mutex_;
  std::condition_variable idle_changed_;
  bool serving_ = false;  // an epoch runs
  bool ever_served_ = false;
  bool draining_ = false;
  EpochLimits limits_;
  int num_requests_ = 0;  // submitted and not ended
  int num_queued_ = 0;    // of them: never admitted yet
  GenerateId last_id_ = 0;
  int64_t state_since_us_;
  std::string last_epoch_end_;
  EngineStatus snapshot_;
  std::atomic<int64_t> last_turn_us_;
  std::atomic<bool> stop_{false};

  std::thread thread_;
};

}  // namespace twinspark::gateway
