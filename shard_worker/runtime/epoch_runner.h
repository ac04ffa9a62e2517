// The running half of an epoch: one compute thread that executes the op log in order, and one
// sender thread that carries results and heartbeats out, watches the deadline of the running op and
// the silence of the gateway, and ends the epoch. The two share no lock: whatever the compute
// thread does, heartbeats go out, and their content says what it does.
//
// Life: Start > Submit / GatewayHeard ... > End (from any side, first reason wins) > on_ended >
// Finish on the sink. After Finish the sink is never called again. The destructor ends the epoch
// and joins.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"

#include "common/limits.h"
#include "shard_worker/runtime/op_executor.h"
#include "shard_worker/runtime/spsc_ring.h"
#include "shard_worker/runtime/worker_backend.h"
#include "shard_worker/runtime/worker_op.h"

namespace twinspark {

enum class WorkerState : uint8_t {
  kIdle,
  kLoading,
  kJoining,
  kReady,
  kServing,
  kDraining,
  kFailed
};
// "IDLE", "LOADING", ...
const char* WorkerStateName(WorkerState state);

struct Heartbeat {
  uint64_t sequence = 0;
  WorkerState state = WorkerState::kServing;
  uint64_t op_id = 0;
  bool busy = false;
  int layers_done = 0;
};

// The worker's side of the stream. Called from the sender thread only, never from the compute
// thread; must not block.
class StepsSink {
 public:
  virtual ~StepsSink() = default;
  virtual void SendResult(const OpOutcome& outcome) = 0;
  virtual void SendHeartbeat(const Heartbeat& heartbeat) = 0;
  // The last call. OK: the gateway closed the stream.
  virtual void Finish(const absl::Status& reason) = 0;
};

// What Status shows of the log; written by the compute thread.
struct EpochCounters {
  std::atomic<uint64_t> last_op_id{0};
  std::atomic<int64_t> last_op_us{0};  // steady clock, when it ended
  std::atomic<uint64_t> ops_executed{0};
  std::atomic<int> slots_in_use{0};
  std::atomic<int> pages_in_use{0};
};

class EpochRunner {
 public:
  struct Options {
    uint64_t epoch = 0;
    int vocab_size = 0;
    int num_layers = 0;
    int64_t heartbeat_interval_ms = limits::kHeartbeatPeriodMs;
    int64_t gateway_silence_ms = limits::kGatewaySilenceMsMax;
  };
  // Called once on the sender thread, after the compute thread has stopped and before Finish.
  using OnEnded = std::function<void(const absl::Status& reason)>;
  // Called on the compute thread after every op.
  using OnOp = std::function<void(const WorkerOp& op, const OpOutcome& outcome)>;

  EpochRunner(const Options& options,
              WorkerBackend& backend,
              const std::atomic<WorkerState>& state,
              EpochCounters& counters,
              OnOp on_op,
              OnEnded on_ended);
  ~EpochRunner();
  EpochRunner(const EpochRunner&) = delete;
  EpochRunner& operator=(const EpochRunner&) = delete;

  void Start(StepsSink& sink);

  // One reading thread. More ops in flight than limits::kMaxOpsInFlight end the epoch.
  void Submit(WorkerOp op);
  void GatewayHeard();

  // Any thread; returns at once. OK = the gateway closed the stream.
  void End(const absl::Status& reason);
  // No op is running, waiting, or done without its result being sent.
  bool idle() const { return in_flight_.load() == 0; }
  bool ending() const { return ending_.load(std::memory_order_acquire); }
  // Makes one rank wrong before its next op. FAILED_PRECONDITION while an earlier fault waits.
  absl::Status Arm(const Fault& fault);

  // Waits until both threads are gone. Whoever drops the last reference joins first: the sender
  // thread must not be the one that destroys its runner.
  void Join();

 private:
  static constexpr size_t kRingSlots = 8;
  static_assert(kRingSlots > static_cast<size_t>(limits::kMaxOpsInFlight));

  void ComputeLoop();
  void SenderLoop();
  void Watch(int64_t now_us);
  void InjectArmedFault();

  const Options options_;
  WorkerBackend& backend_;
  const std::atomic<WorkerState>& state_;
  EpochCounters& counters_;
  const OnOp on_op_;
  const OnEnded on_ended_;
  OpExecutor executor_;
  StepsSink* sink_ = nullptr;

  SpscRing<WorkerOp, kRingSlots> ops_;
  SpscRing<OpOutcome, kRingSlots> outcomes_;
  std::atomic<int> in_flight_{0};
  std::atomic<int64_t> gateway_heard_us_{0};
  std::atomic<uint64_t> running_op_id_{0};
  std::atomic<int64_t> running_deadline_us_{0};  // 0 = no op is running

  std::atomic<bool> end_claimed_{false};
  absl::Status end_reason_;  // written by whoever claimed, read after ending_
  std::atomic<bool> ending_{false};
  std::atomic<bool> compute_done_{false};

  std::atomic<int> fault_state_{0};  // 0 none, 1 being written, 2 armed
  Fault fault_;

  std::mutex join_mutex_;
  std::thread compute_thread_;
  std::thread sender_thread_;
};

}  // namespace twinspark
