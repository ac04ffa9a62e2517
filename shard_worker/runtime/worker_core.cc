// See worker_core.h.
#include "shard_worker/runtime/worker_core.h"

#include <chrono>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/check.h"
#include "common/exit_codes.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace twinspark {
namespace {

constexpr size_t kMaxErrorsKept = 16;
// Between the close of one sequence and the opening of the next a busy epoch has none open either.
constexpr int64_t kIdleUs = 100'000;

int64_t SteadyNowUs() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

absl::Status CheckDigest(const char* what, const std::string& expected, const std::string& have) {
  if (expected.empty() || expected == have) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat(what, " digests differ: expected ", expected, ", this worker has ", have,
                   "; give all processes the same model and settings"));
}

}  // namespace

int FatalExitCode(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kResourceExhausted:
      return kExitNoMemory;
    case absl::StatusCode::kNotFound:
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kDataLoss:
      return kExitBadData;
    case absl::StatusCode::kInternal:
      return kExitDevice;
    default:
      return 0;
  }
}

WorkerCore::WorkerCore(const Options& options,
                       WorkerBackend& backend,
                       const Clock& clock,
                       ExitCallback on_exit,
                       OnOp on_op)
    : options_(options),
      backend_(backend),
      clock_(clock),
      on_exit_(std::move(on_exit)),
      on_op_(std::move(on_op)),
      state_since_ms_(clock.NowMs()) {}

WorkerCore::~WorkerCore() {
  std::shared_ptr<EpochRunner> runner;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    runner = runner_;
  }
  if (runner != nullptr) {
    runner->End(absl::CancelledError("the worker is shutting down"));
    runner->Join();
  }
}

void WorkerCore::SetState(WorkerState state) {
  state_.store(state);
  state_since_ms_ = clock_.NowMs();
  LOG_INFO << "worker state=" << WorkerStateName(state) << " epoch=" << config_.epoch
           << " rank=" << config_.rank;
}

void WorkerCore::RememberError(const std::string& line) {
  errors_.push_back(line);
  if (errors_.size() > kMaxErrorsKept) errors_.pop_front();
}

void WorkerCore::Fail(const absl::Status& status, int exit_code) {
  const std::string reason(status.message());
  LOG_ERROR << "worker failed exit_code=" << exit_code << " reason=\"" << reason << "\"";
  RememberError(reason);
  exit_code_ = exit_code;
  exit_reason_ = reason;
  SetState(WorkerState::kFailed);
}

void WorkerCore::Exit(int exit_code, const std::string& reason) {
  if (!exited_.exchange(true)) on_exit_(exit_code, reason);
}

absl::StatusOr<std::string> WorkerCore::PrepareGroup(uint64_t epoch, int rank, int world) {
  if (world < 1 || world > limits::kMaxRanks || rank < 0 || rank >= world) {
    return absl::InvalidArgumentError(
        absl::StrCat("PrepareGroup: rank ", rank, " of world ", world, " does not exist"));
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  const WorkerState state = state_.load();
  if (state != WorkerState::kIdle) {
    return absl::FailedPreconditionError(absl::StrCat("PrepareGroup: the worker is ",
                                                      WorkerStateName(state), " in epoch ",
                                                      config_.epoch, ", not IDLE"));
  }
  if (epoch <= highest_epoch_) {
    return absl::FailedPreconditionError(absl::StrCat("PrepareGroup: epoch ", epoch,
                                                      " is not above ", highest_epoch_,
                                                      ", the last one this worker saw"));
  }
  ASSIGN_OR_RETURN(std::string endpoint, backend_.PrepareGroup(epoch, rank, world));
  highest_epoch_ = epoch;
  return endpoint;
}

absl::Status WorkerCore::EnterLoading(const GroupConfig& config) {
  std::shared_ptr<EpochRunner> old;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (state_.load() == WorkerState::kIdle) old = std::move(runner_);
  }
  if (old != nullptr) old->Join();
  const std::lock_guard<std::mutex> lock(mutex_);
  const WorkerState state = state_.load();
  if (state != WorkerState::kIdle) {
    return absl::FailedPreconditionError(absl::StrCat("Configure: the worker is ",
                                                      WorkerStateName(state), " in epoch ",
                                                      config_.epoch, ", not IDLE"));
  }
  if (config.epoch < highest_epoch_ || config.epoch <= config_.epoch) {
    return absl::FailedPreconditionError(absl::StrCat(
        "Configure: epoch ", config.epoch, " is over, this worker saw ", highest_epoch_));
  }
  highest_epoch_ = config.epoch;
  config_ = config;
  progress_ = LoadState();
  timings_.Clear();
  counters_.last_op_id.store(0);
  counters_.last_op_us.store(0);
  counters_.ops_executed.store(0);
  counters_.slots_in_use.store(0);
  counters_.pages_in_use.store(0);
  SetState(WorkerState::kLoading);
  return absl::OkStatus();
}

absl::StatusOr<ReadyReport> WorkerCore::LoadAndJoin(const GroupConfig& config,
                                                    const Progress& progress) {
  const LoadObserver observer = [&](const LoadState& load) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      progress_ = load;
    }
    progress(state_.load(), load);
  };
  ReadyReport report;
  ASSIGN_OR_RETURN(report.load, backend_.Load(config, observer));
  RETURN_IF_ERROR(CheckDigest("config", config.expected_config_digest, report.load.config_digest));
  RETURN_IF_ERROR(
      CheckDigest("weights", config.expected_weights_digest, report.load.weights_digest));
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    report_ = report.load;
    progress_.phase = "join";
    SetState(WorkerState::kJoining);
  }
  LoadState joining;
  joining.phase = "join";
  progress(WorkerState::kJoining, joining);
  ASSIGN_OR_RETURN(report.costs, backend_.Join(config, report.load));
  report.row_service = backend_.RowService();
  return report;
}

absl::StatusOr<ReadyReport> WorkerCore::EnterReady(const GroupConfig& config,
                                                   absl::StatusOr<ReadyReport> report,
                                                   bool cancelled) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (report.ok() && cancelled) report = absl::CancelledError("the gateway went away");
  if (report.ok()) {
    progress_ = LoadState();
    SetState(WorkerState::kReady);
    LOG_INFO << "epoch ready epoch=" << config.epoch << " rank=" << config.rank << "/"
             << config.world << " warm=" << report->load.warm
             << " weights=" << report->load.weights_digest
             << " config=" << report->load.config_digest
             << " slots=" << report->load.granted.num_slots
             << " pages=" << report->load.granted.num_pages
             << " load_seconds=" << report->load.load_seconds;
    return report;
  }
  backend_.Leave();
  // In JOINING only the device is our own; whatever else failed lies between the processes.
  const bool loading = state_.load() == WorkerState::kLoading;
  int exit_code = loading || absl::IsInternal(report.status()) ? FatalExitCode(report.status()) : 0;
  // Files that are bad now say nothing about the weights in memory, and may be whole again at the
  // next Configure. A load gives the old weights back first, so one that fails still ends here.
  if (exit_code == kExitBadData && !backend_.ResidentWeightsDigest().empty()) exit_code = 0;
  if (exit_code != 0) {
    Fail(report.status(), exit_code);
  } else {
    LOG_WARNING << "configure refused epoch=" << config.epoch << " rank=" << config.rank
                << " reason=\"" << report.status() << "\"";
    RememberError(std::string(report.status().message()));
    SetState(WorkerState::kIdle);
  }
  return report;
}

absl::StatusOr<ReadyReport> WorkerCore::Configure(const GroupConfig& config,
                                                  const Progress& progress,
                                                  const std::function<bool()>& cancelled) {
  if (config.world < 1 || config.world > limits::kMaxRanks || config.rank < 0 ||
      config.rank >= config.world) {
    return absl::InvalidArgumentError(absl::StrCat("Configure: rank ", config.rank, " of world ",
                                                   config.world, " does not exist"));
  }
  RETURN_IF_ERROR(EnterLoading(config));
  // A gateway that goes away while ranks wait for each other: Join is made to fail.
  std::atomic<bool> done{false};
  std::thread canceller([&] {
    while (!done.load()) {
      if (cancelled() && state_.load() == WorkerState::kJoining) backend_.Abort();
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  });
  absl::StatusOr<ReadyReport> report = LoadAndJoin(config, progress);
  done.store(true);
  canceller.join();
  report = EnterReady(config, std::move(report), cancelled());
  bool draining = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    draining = draining_;
  }
  if (draining) Exit(kExitOk, "drained");
  return report;
}

absl::StatusOr<OpenedSteps> WorkerCore::OpenSteps(const StepsOpening& opening) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const WorkerState state = state_.load();
  if (state != WorkerState::kReady) {
    return absl::FailedPreconditionError(
        absl::StrCat("Steps: the worker is ", WorkerStateName(state), ", not READY"));
  }
  if (opening.epoch != config_.epoch) {
    return absl::FailedPreconditionError(absl::StrCat("Steps: the stream is of epoch ",
                                                      opening.epoch, ", this worker is in epoch ",
                                                      config_.epoch));
  }
  RETURN_IF_ERROR(CheckDigest("config", opening.config_digest, report_->config_digest));
  RETURN_IF_ERROR(CheckDigest("weights", opening.weights_digest, report_->weights_digest));
  EpochRunner::Options options;
  options.epoch = config_.epoch;
  options.vocab_size = report_->model.vocab_size;
  options.num_layers = report_->model.num_layers;
  if (config_.heartbeat_interval_ms > 0)
    options.heartbeat_interval_ms = config_.heartbeat_interval_ms;
  if (config_.gateway_silence_ms > 0) options.gateway_silence_ms = config_.gateway_silence_ms;
  SetState(WorkerState::kServing);
  runner_ = std::make_shared<EpochRunner>(
      options, backend_, state_, counters_,
      [this, group = config_](const WorkerOp& op, const OpOutcome& outcome) {
        timings_.Add(outcome.timings);
        on_op_(group, op, outcome);
      },
      [this](const absl::Status& reason) { OnEpochEnded(reason); });
  return OpenedSteps{runner_, config_.epoch, config_.rank, report_->granted, report_->model};
}

void WorkerCore::OnEpochEnded(const absl::Status& reason) {
  backend_.Leave();
  bool draining = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    counters_.slots_in_use.store(0);
    counters_.pages_in_use.store(0);
    if (absl::IsInternal(reason)) {
      Fail(reason, kExitDevice);
      return;
    }
    if (reason.ok()) {
      LOG_INFO << "epoch ended epoch=" << config_.epoch << " reason=\"closed by the gateway\"";
    } else {
      LOG_WARNING << "epoch ended epoch=" << config_.epoch << " rank=" << config_.rank
                  << " last_op=" << counters_.last_op_id.load() << " reason=\"" << reason << "\"";
      RememberError(absl::StrCat("epoch ", config_.epoch, ": ", std::string(reason.message())));
    }
    draining = draining_;
    if (!draining) SetState(WorkerState::kIdle);
  }
  if (draining) Exit(kExitOk, "drained");
}

WorkerStatus WorkerCore::Status() const {
  WorkerStatus status;
  status.last_op_id = counters_.last_op_id.load();
  const int64_t last_op_us = counters_.last_op_us.load();
  if (last_op_us != 0) status.last_op_age_ms = (SteadyNowUs() - last_op_us) / 1000;
  status.ops_executed = counters_.ops_executed.load();
  status.slots_in_use = counters_.slots_in_use.load();
  status.pages_in_use = counters_.pages_in_use.load();
  status.op_timings = timings_.Summaries();
  status.row_service = backend_.RowService();
  status.weights_digest = backend_.ResidentWeightsDigest();
  status.config_digest = backend_.ResidentConfigDigest();
  const std::lock_guard<std::mutex> lock(mutex_);
  status.state = state_.load();
  status.epoch = config_.epoch;
  status.rank = config_.rank;
  status.world = config_.world;
  if (report_.has_value()) {
    status.limits = report_->granted;
    status.memory = report_->memory_plan;
  }
  status.progress = progress_;
  status.errors.assign(errors_.begin(), errors_.end());
  return status;
}

void WorkerCore::Drain(const std::string& reason) {
  bool exit_now = false;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (draining_) return;
    draining_ = true;
    drain_reason_ = reason;
    drain_until_ms_ = clock_.NowMs() + static_cast<int64_t>(options_.drain_seconds * 1000);
    LOG_INFO << "drain reason=\"" << reason << "\" state=" << WorkerStateName(state_.load());
    switch (state_.load()) {
      case WorkerState::kServing:
        SetState(WorkerState::kDraining);
        break;
      case WorkerState::kLoading:
      case WorkerState::kJoining:
        backend_.Abort();  // Configure returns and exits; a long load is left at the next Tick
        drain_until_ms_ = clock_.NowMs();
        break;
      default:
        SetState(WorkerState::kDraining);
        exit_now = true;
    }
  }
  if (exit_now) Exit(kExitOk, "drained");
}

absl::Status WorkerCore::Reset(const std::string& reason, bool drop_weights) {
  std::shared_ptr<EpochRunner> runner;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const WorkerState state = state_.load();
    if (state != WorkerState::kIdle && state != WorkerState::kReady &&
        state != WorkerState::kServing) {
      return absl::FailedPreconditionError(
          absl::StrCat("Reset: the worker is ", WorkerStateName(state)));
    }
    if (state == WorkerState::kReady) {
      backend_.Leave();
      SetState(WorkerState::kIdle);
    }
    runner = runner_;
  }
  LOG_INFO << "reset reason=\"" << reason << "\" drop_weights=" << drop_weights;
  if (runner != nullptr) {
    runner->End(absl::CancelledError(absl::StrCat("reset: ", reason)));
    runner->Join();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_.load() != WorkerState::kIdle) {
    return absl::FailedPreconditionError(
        absl::StrCat("Reset: the worker is ", WorkerStateName(state_.load()), " now"));
  }
  runner_.reset();
  if (drop_weights) {
    backend_.Unload();
    report_.reset();
  }
  return absl::OkStatus();
}

absl::Status WorkerCore::InjectFault(const Fault& fault) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (state_.load() != WorkerState::kServing) {
    return absl::FailedPreconditionError(
        absl::StrCat("the worker is ", WorkerStateName(state_.load()), ", not SERVING"));
  }
  return runner_->Arm(fault);
}

// READY > IDLE: the epoch ends before a stream came.
void WorkerCore::LeaveReady(const std::string& why) {
  RememberError(absl::StrCat("epoch ", config_.epoch, ": ", why));
  LOG_WARNING << "epoch ended epoch=" << config_.epoch << " reason=\"" << why << "\"";
  backend_.Leave();
  SetState(WorkerState::kIdle);
}

// A step that waits for rows watches the service itself; between steps nobody else would.
void WorkerCore::WatchRowService() {
  const auto in_epoch = [this] {
    const WorkerState state = state_.load();
    return state == WorkerState::kReady || state == WorkerState::kServing ||
           state == WorkerState::kDraining;
  };
  uint64_t epoch = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    epoch = config_.epoch;
  }
  if (!in_epoch()) return;
  const absl::Status alive = backend_.CheckRowService();
  if (alive.ok()) return;
  std::shared_ptr<EpochRunner> to_end;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (config_.epoch != epoch || !in_epoch()) return;
    if (state_.load() == WorkerState::kReady) {
      LeaveReady(std::string(alive.message()));
    } else {
      to_end = runner_;
    }
  }
  if (to_end != nullptr) to_end->End(alive);
}

// An epoch in which nobody waits for a token, as far as this rank can know.
bool WorkerCore::NothingToFinish() const {
  return runner_ != nullptr && runner_->idle() && counters_.slots_in_use.load() == 0 &&
         SteadyNowUs() - counters_.last_op_us.load() > kIdleUs;
}

void WorkerCore::Tick() {
  WatchRowService();
  bool exit_now = false;
  int exit_code = kExitOk;
  std::string exit_reason = "drained";
  std::shared_ptr<EpochRunner> to_end;
  std::string why_end;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    const int64_t now_ms = clock_.NowMs();
    const int64_t age_ms = now_ms - state_since_ms_;
    if (state_.load() == WorkerState::kReady && age_ms > options_.ready_wait_ms) {
      LeaveReady(absl::StrCat("no Steps stream came within ", options_.ready_wait_ms, " ms"));
    } else if (state_.load() == WorkerState::kFailed && age_ms >= options_.failed_linger_ms) {
      exit_now = true;
      exit_code = exit_code_;
      exit_reason = exit_reason_;
    } else if (draining_ && now_ms >= drain_until_ms_) {
      to_end = runner_;
      exit_now = to_end == nullptr || to_end->ending();
      why_end = "the drain time is over";
    } else if (state_.load() == WorkerState::kDraining && NothingToFinish()) {
      to_end = runner_;
      why_end = "no sequence is open";
    }
    if (to_end != nullptr) {
      why_end = absl::StrCat("the worker stops (", drain_reason_, "): ", why_end);
    }
  }
  if (to_end != nullptr) to_end->End(absl::UnavailableError(why_end));
  if (exit_now) Exit(exit_code, exit_reason);
}

}  // namespace twinspark
