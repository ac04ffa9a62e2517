// See epoch_runner.h.
#include "shard_worker/runtime/epoch_runner.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "common/log.h"

namespace twinspark {
namespace {

int64_t NowUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

const char* WorkerStateName(WorkerState state) {
  switch (state) {
    case WorkerState::kIdle:
      return "IDLE";
    case WorkerState::kLoading:
      return "LOADING";
    case WorkerState::kJoining:
      return "JOINING";
    case WorkerState::kReady:
      return "READY";
    case WorkerState::kServing:
      return "SERVING";
    case WorkerState::kDraining:
      return "DRAINING";
    case WorkerState::kFailed:
      return "FAILED";
  }
  return "UNKNOWN";
}

EpochRunner::EpochRunner(const Options& options,
                         WorkerBackend& backend,
                         const std::atomic<WorkerState>& state,
                         EpochCounters& counters,
                         OnOp on_op,
                         OnEnded on_ended)
    : options_(options),
      backend_(backend),
      state_(state),
      counters_(counters),
      on_op_(std::move(on_op)),
      on_ended_(std::move(on_ended)),
      executor_(backend, options.vocab_size, options.num_layers) {}

EpochRunner::~EpochRunner() {
  End(absl::CancelledError("the worker is shutting down"));
  Join();
}

void EpochRunner::Join() {
  const std::lock_guard<std::mutex> lock(join_mutex_);
  if (compute_thread_.joinable()) compute_thread_.join();
  if (sender_thread_.joinable()) sender_thread_.join();
}

void EpochRunner::Start(StepsSink& sink) {
  CHECK(sink_ == nullptr) << "an epoch is started once";
  sink_ = &sink;
  GatewayHeard();
  compute_thread_ = std::thread([this] { ComputeLoop(); });
  sender_thread_ = std::thread([this] { SenderLoop(); });
}

void EpochRunner::Submit(WorkerOp op) {
  GatewayHeard();
  if (in_flight_.fetch_add(1) >= limits::kMaxOpsInFlight) {
    End(absl::InvalidArgumentError(
        absl::StrCat("op ", op.op_id, " came while ", limits::kMaxOpsInFlight, " were in flight")));
    return;
  }
  op.received_us = NowUs();
  CHECK(ops_.Push(std::move(op))) << "the ring holds more than may be in flight";
}

void EpochRunner::GatewayHeard() {
  gateway_heard_us_.store(NowUs());
}

void EpochRunner::End(const absl::Status& reason) {
  if (end_claimed_.exchange(true)) return;
  end_reason_ = reason;
  ending_.store(true, std::memory_order_release);
  backend_.Abort();
  ops_.Wake();
  outcomes_.Wake();
}

absl::Status EpochRunner::Arm(const Fault& fault) {
  int none = 0;
  if (!fault_state_.compare_exchange_strong(none, 1)) {
    return absl::FailedPreconditionError("an earlier fault has not been injected yet");
  }
  fault_ = fault;
  fault_state_.store(2, std::memory_order_release);
  return absl::OkStatus();
}

void EpochRunner::InjectArmedFault() {
  if (fault_state_.load(std::memory_order_acquire) != 2) return;
  const absl::StatusOr<std::string> what = backend_.Inject(fault_);
  LOG_WARNING << "fault injected epoch=" << options_.epoch << " op=" << running_op_id_.load()
              << " what=" << (what.ok() ? *what : what.status().ToString());
  fault_state_.store(0, std::memory_order_release);
}

void EpochRunner::ComputeLoop() {
  while (!ending()) {
    std::optional<WorkerOp> op = ops_.Pop();
    if (!op.has_value()) {
      ops_.Wait();
      continue;
    }
    running_op_id_.store(op->op_id);
    const int64_t deadline_ms = std::max(op->deadline_ms, limits::kOpDeadlineMsMin);
    running_deadline_us_.store(NowUs() + deadline_ms * 1000);
    InjectArmedFault();
    OpOutcome outcome = executor_.Execute(*op);
    running_deadline_us_.store(0);
    // An op that the end of the epoch broke off says why it ended, not how it was broken off.
    if (!outcome.status.ok() && ending() && !end_reason_.ok()) outcome.status = end_reason_;
    counters_.last_op_id.store(op->op_id);
    counters_.last_op_us.store(NowUs());
    counters_.ops_executed.fetch_add(1);
    counters_.slots_in_use.store(backend_.SlotsInUse());
    counters_.pages_in_use.store(backend_.PagesInUse());
    on_op_(*op, outcome);
    const absl::Status status = outcome.status;
    CHECK(outcomes_.Push(std::move(outcome))) << "the ring holds more than may be in flight";
    if (!status.ok() && !absl::IsUnimplemented(status)) {
      End(absl::Status(status.code(),
                       absl::StrCat("op ", op->op_id, ": ", std::string(status.message()))));
      break;
    }
  }
  compute_done_.store(true, std::memory_order_release);
  outcomes_.Wake();
}

// Deadline of the running op and silence of the gateway: sender thread, so that a compute thread
// that hangs cannot stop the watching.
void EpochRunner::Watch(int64_t now_us) {
  if (ending()) return;
  const int64_t silence_ms = (now_us - gateway_heard_us_.load()) / 1000;
  if (silence_ms > options_.gateway_silence_ms) {
    End(absl::UnavailableError(absl::StrCat("the gateway was silent for ", silence_ms,
                                            " ms, limit ", options_.gateway_silence_ms)));
    return;
  }
  const int64_t deadline_us = running_deadline_us_.load();
  if (deadline_us != 0 && now_us > deadline_us) {
    End(absl::DeadlineExceededError(absl::StrCat(
        "op ", running_op_id_.load(),
        " was not finished within its deadline; layers done: ", backend_.LayersDone())));
  }
}

void EpochRunner::SenderLoop() {
  const int64_t period_us = options_.heartbeat_interval_ms * 1000;
  int64_t next_heartbeat_us = NowUs();
  uint64_t sequence = 0;
  while (true) {
    // Read before the ring is emptied: what was pushed before it was set is then sent.
    const bool last_turn = compute_done_.load(std::memory_order_acquire);
    while (std::optional<OpOutcome> outcome = outcomes_.Pop()) {
      in_flight_.fetch_sub(1);
      sink_->SendResult(*outcome);
      next_heartbeat_us = NowUs() + period_us;  // a result is a sign of life too
    }
    if (last_turn && ending()) break;
    const int64_t now_us = NowUs();
    Watch(now_us);
    if (now_us >= next_heartbeat_us) {
      const bool busy = running_deadline_us_.load() != 0;
      sink_->SendHeartbeat({++sequence, state_.load(), running_op_id_.load(), busy,
                            busy ? backend_.LayersDone() : 0});
      next_heartbeat_us = now_us + period_us;
    }
    outcomes_.WaitFor(std::chrono::microseconds(std::max<int64_t>(next_heartbeat_us - now_us, 0)));
  }
  on_ended_(end_reason_);
  sink_->Finish(end_reason_);
}

}  // namespace twinspark
