// The state machine of a shard worker (protocol specification 2): which request is answered in
// which state, what an end of an epoch leaves behind, which failure ends the process and with which
// code.
//
//   IDLE > LOADING > JOINING > READY > SERVING > IDLE ...      DRAINING: on the way to exit 0
//   any own fault (weights, memory, device) > FAILED > exit 65, 75, 71
//
// No gRPC, no proto: the service translates. Thread-safe. Configure blocks for as long as loading
// takes; everything else returns soon.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "common/clock.h"
#include "shard_worker/runtime/epoch_runner.h"
#include "shard_worker/runtime/op_timings.h"
#include "shard_worker/runtime/worker_backend.h"

namespace twinspark {

struct StepsOpening {
  uint64_t epoch = 0;
  std::string config_digest;
  std::string weights_digest;
};

// What the reader of the stream needs to know; the runner has yet to be started on the stream's
// sink.
struct OpenedSteps {
  std::shared_ptr<EpochRunner> runner;
  uint64_t epoch = 0;
  int rank = 0;
  GroupLimits granted;
  ModelFacts model;
};

struct ReadyReport {
  LoadReport load;
  std::vector<StepCost> costs;
  RowServiceFacts row_service;
};

struct WorkerStatus {
  WorkerState state = WorkerState::kIdle;
  uint64_t epoch = 0;
  int rank = 0;
  int world = 0;
  uint64_t last_op_id = 0;
  int64_t last_op_age_ms = 0;
  uint64_t ops_executed = 0;
  int slots_in_use = 0;
  int pages_in_use = 0;
  GroupLimits limits;
  std::vector<MemoryUse> memory;
  std::vector<OpTimingSummary> op_timings;
  RowServiceFacts row_service;
  LoadState progress;
  std::vector<std::string> errors;
  std::string weights_digest;
  std::string config_digest;
};

class WorkerCore {
 public:
  struct Options {
    double drain_seconds = 20;
    // READY without a Steps stream for so long: the gateway went away in between.
    int64_t ready_wait_ms = 5 * limits::kGatewaySilenceMsMax;
    // FAILED stays visible in Status for so long before the process exits.
    int64_t failed_linger_ms = 1000;
  };
  using ExitCallback = std::function<void(int exit_code, const std::string& reason)>;
  using Progress = std::function<void(WorkerState state, const LoadState& load)>;

  // After every op, on the compute thread.
  using OnOp =
      std::function<void(const GroupConfig& group, const WorkerOp& op, const OpOutcome& outcome)>;

  // `on_exit` is called once, when the process should end.
  WorkerCore(const Options& options,
             WorkerBackend& backend,
             const Clock& clock,
             ExitCallback on_exit,
             OnOp on_op);
  ~WorkerCore();

  WorkerBackend& backend() { return backend_; }
  WorkerState state() const { return state_.load(); }
  // True once on_exit was called.
  bool exiting() const { return exited_.load(); }

  absl::StatusOr<std::string> PrepareGroup(uint64_t epoch, int rank, int world);

  // `cancelled` is asked now and then: the caller of the RPC went away.
  absl::StatusOr<ReadyReport> Configure(const GroupConfig& config,
                                        const Progress& progress,
                                        const std::function<bool()>& cancelled);

  // READY > SERVING. The caller starts the runner, which lives until the next epoch.
  absl::StatusOr<OpenedSteps> OpenSteps(const StepsOpening& opening);

  WorkerStatus Status() const;

  // Returns at once; `on_exit(0)` follows when no sequence is open and no op came for a moment,
  // when the gateway has closed Steps, or after drain_seconds.
  void Drain(const std::string& reason);
  // Ends what runs and returns when IDLE. FAILED_PRECONDITION while loading.
  absl::Status Reset(const std::string& reason, bool drop_weights);
  absl::Status InjectFault(const Fault& fault);

  // Time-outs of READY, DRAINING and FAILED; and an epoch whose row service is gone ends, also when
  // nothing is asked of it. Call every 100 ms or so.
  void Tick();

 private:
  absl::Status EnterLoading(const GroupConfig& config);
  absl::StatusOr<ReadyReport> LoadAndJoin(const GroupConfig& config, const Progress& progress);
  absl::StatusOr<ReadyReport> EnterReady(const GroupConfig& config,
                                         absl::StatusOr<ReadyReport> report,
                                         bool cancelled);
  void OnEpochEnded(const absl::Status& reason);
  bool NothingToFinish() const;  // mutex_ held
  void WatchRowService();
  void LeaveReady(const std::string& why);               // mutex_ held
  void RememberError(const std::string& line);           // mutex_ held
  void SetState(WorkerState state);                      // mutex_ held
  void Fail(const absl::Status& status, int exit_code);  // mutex_ held
  void Exit(int exit_code, const std::string& reason);

  const Options options_;
  WorkerBackend& backend_;
  const Clock& clock_;
  const ExitCallback on_exit_;
  const OnOp on_op_;
  EpochCounters counters_;
  OpTimingTable timings_;

  mutable std::mutex mutex_;
  std::atomic<WorkerState> state_{WorkerState::kIdle};  // written under mutex_
  int64_t state_since_ms_ = 0;
  bool draining_ = false;  // exit when the epoch is over
  int64_t drain_until_ms_ = 0;
  std::string drain_reason_;
  uint64_t highest_epoch_ = 0;  // seen in PrepareGroup or Configure
  GroupConfig config_;          // of the running or last epoch
  std::optional<LoadReport> report_;
  LoadState progress_;
  std::deque<std::string> errors_;
  int exit_code_ = 0;
  std::string exit_reason_;
  std::atomic<bool> exited_{false};
  std::shared_ptr<EpochRunner> runner_;
};

// The exit code for an error from Load or a step; 0 when the error is not fatal to the process.
int FatalExitCode(const absl::Status& status);

}  // namespace twinspark
