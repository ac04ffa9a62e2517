#include "gateway/engine/engine_loop.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"

#include "common/build_info.h"
#include "common/check.h"
#include "common/ids.h"
#include "common/limits.h"
#include "common/log.h"
#include "gateway/engine/step_stream_client.h"

namespace twinspark::gateway {
namespace {

constexpr int64_t kTurnUs = 100'000;     // the loop turns at least this often
constexpr int64_t kHoldUs = 20'000;      // and goes on reading a rank while others are awaited
constexpr int64_t kPublishUs = 100'000;  // how old the snapshot behind /status may be
constexpr int64_t kMetricsUs = 500'000;  // and the gauges of /metrics, of which there are many
constexpr int64_t kAliveUs = 5'000'000;  // /live
constexpr int64_t kAbortMs = 2000;       // for the last events after an abort

double Seconds(int64_t from_us, int64_t to_us) {
  return static_cast<double>(to_us - from_us) * 1e-6;
}

// Of a phase that may not have begun (0).
double PhaseSeconds(int64_t from_us, int64_t to_us) {
  return from_us == 0 || to_us == 0 ? -1 : Seconds(from_us, to_us);
}

}  // namespace

EngineLoop::EngineLoop(const EngineConfig& config,
                       const Clock& clock,
                       EngineInbox& inbox,
                       EpochManager& epochs,
                       WorkerMonitor& monitor,
                       WorkerBoard& board,
                       Metrics& metrics)
    : config_(config),
      clock_(clock),
      inbox_(inbox),
      epochs_(epochs),
      monitor_(monitor),
      board_(board),
      metrics_(metrics, config.model_id, BuildId()),
      start_us_(clock.NowUs()),
      scheduler_(config.scheduler),
      state_since_us_(start_us_),
      last_turn_us_(start_us_),
      thread_([this] { Run(); }) {}

EngineLoop::~EngineLoop() {
  stop_ = true;
  inbox_.Wake();
  thread_.join();
}

// ---- Callers' threads --------------------------------------------------------------------------

EngineState EngineLoop::State() const {
  if (draining_) return EngineState::kDraining;
  if (serving_) return EngineState::kReady;
  return ever_served_ ? EngineState::kRecovering : EngineState::kBooting;
}

absl::StatusOr<GenerateId> EngineLoop::Submit(GenerateRequest request,
                                              std::shared_ptr<GenerateEvents> events) {
  const auto reject = [this](const char* reason, absl::Status status) {
    metrics_.OnRejected(reason);
    return status;
  };
  std::lock_guard lock(mutex_);
  if (draining_) return reject("draining", absl::UnavailableError("the server is shutting down"));
  if (!serving_) {
    const std::string why = ever_served_ ? last_epoch_end_ : epochs_.Facts().waiting_for;
    return reject("not_ready",
                  absl::UnavailableError(absl::StrCat("the model is not ready: ", why)));
  }
  if (request.prompt_ids.size() > static_cast<size_t>(limits::kMaxPromptIds)) {
    return reject("too_long", absl::InvalidArgumentError(absl::StrCat(
                                  "the prompt has ", request.prompt_ids.size(), " tokens")));
  }
  for (const int32_t id : request.prompt_ids) {
    if (id < 0 || (limits_.vocab_size > 0 && id >= limits_.vocab_size)) {
      return reject("bad_token", absl::InvalidArgumentError(absl::StrCat(
                                     "token id ", id, " is not below ", limits_.vocab_size)));
    }
  }
  if (absl::Status bad = CheckSamplingParams(request.sampling, limits_.vocab_size); !bad.ok()) {
    return reject("bad_parameter", std::move(bad));
  }
  auto max_tokens = Scheduler::ResolveMaxTokens(config_.scheduler, limits_,
                                                static_cast<int32_t>(request.prompt_ids.size()),
                                                request.max_tokens.value_or(0));
  if (!max_tokens.ok()) return reject("too_long", max_tokens.status());
  if (num_queued_ >= static_cast<int>(config_.scheduler.max_queue)) {
    return reject("queue_full", absl::ResourceExhaustedError(absl::StrCat(
                                    "the queue is full: ", num_queued_, " requests wait")));
  }
  ++num_queued_;
  ++num_requests_;
  const GenerateId id = ++last_id_;
  // Under the lock, so that the inbox has ids in ascending order.
  inbox_.Push(SubmitMessage{id, std::move(request), std::move(events)});
  return id;
}

void EngineLoop::Cancel(GenerateId id) {
  inbox_.Push(EndMessage{id, EndReason::kCancelled});
}

void EngineLoop::Finish(GenerateId id) {
  inbox_.Push(EndMessage{id, EndReason::kFinished});
}

EngineStatus EngineLoop::GetStatus() const {
  const EpochFacts facts = epochs_.Facts();
  const int64_t now_us = clock_.NowUs();
  EngineStatus status;
  {
    std::lock_guard lock(mutex_);
    status = snapshot_;
    status.state = State();
    status.state_age_s = Seconds(state_since_us_, now_us);
    status.last_epoch_end = last_epoch_end_;
    if (status.state == EngineState::kBooting) {
      status.reason = absl::StrCat("waiting for workers: ", facts.waiting_for);
    } else if (status.state == EngineState::kRecovering) {
      status.reason = absl::StrCat(last_epoch_end_, "; waiting for workers: ", facts.waiting_for);
    } else if (status.state == EngineState::kDraining) {
      status.reason = "the server is shutting down";
    }
  }
  status.build_id = BuildId();
  status.model_id = config_.model_id;
  status.not_enforced = config_.not_enforced;
  status.uptime_s = Seconds(start_us_, now_us);
  status.epoch = facts.epoch;
  status.config_digest = facts.config_digest;
  status.weights_digest = facts.weights_digest;
  status.alive = now_us - last_turn_us_.load() < kAliveUs * limits::kTimeScale;
  status.workers = board_.Snapshot();
  return status;
}

void EngineLoop::Drain(int64_t timeout_ms) {
  std::unique_lock lock(mutex_);
  if (!draining_) state_since_us_ = clock_.NowUs();
  draining_ = true;
  LOG_INFO << "draining requests=" << num_requests_ << " timeout_ms=" << timeout_ms;
  const auto idle = [this] { return num_requests_ == 0; };
  if (idle_changed_.wait_for(lock, std::chrono::milliseconds(timeout_ms), idle)) return;
  inbox_.Push(AbortAllMessage{absl::UnavailableError("shutting_down: the drain time is over")});
  idle_changed_.wait_for(lock, std::chrono::milliseconds(kAbortMs * limits::kTimeScale), idle);
}

// ---- Engine thread -----------------------------------------------------------------------------

void EngineLoop::Run() {
  bool was_idle = true;
  bool was_empty = true;
  while (!stop_) {
    std::vector<EngineMessage> messages = inbox_.Take(WaitUs());
    const int64_t now_us = clock_.NowUs();
    ExtendDeadline(now_us - last_turn_us_.exchange(now_us));
    for (EngineMessage& message : messages) {
      std::visit([this](auto& m) { Handle(std::move(m)); }, message);
    }
    CheckDeadlines();
    SendSteps();
    // Not while another rank's result is about to come: what is sent then acknowledges this one.
    if (group_ != nullptr && (messages.empty() || !AwaitsOtherRanks())) group_->ReadOn();
    DeliverEvents();
    // The first look after the last request shows free slots and pages.
    const bool is_idle = scheduler_.num_running() == 0 && scheduler_.num_waiting() == 0;
    const bool is_empty = scheduler_.empty();
    PublishStatus(/*force=*/is_idle && !was_idle);
    PublishMetrics(/*force=*/is_empty && !was_empty);
    was_idle = is_idle;
    was_empty = is_empty;
  }
  FailRequests(absl::UnavailableError("shutting_down: the gateway ends"));
  monitor_.Watch(nullptr);
  group_.reset();
}

// Until the next turn, if no message comes before.
int64_t EngineLoop::WaitUs() const {
  const int64_t longest_us = group_ != nullptr && AwaitsOtherRanks() ? kHoldUs : kTurnUs;
  const int64_t due_us = scheduler_.close_due_us();
  return due_us == 0 ? longest_us : std::clamp(due_us - clock_.NowUs(), int64_t{0}, longest_us);
}

void EngineLoop::Handle(SubmitMessage message) {
  GenerateRequest& request = message.request;
  Running running;
  running.request_id = request.request_id;
  running.request_hash = Hash64(request.request_id);
  running.events = std::move(message.events);
  running.num_prompt_tokens = static_cast<int32_t>(request.prompt_ids.size());
  running.accept_us = clock_.NowUs();
  LOG_INFO << "request accepted id=" << running.request_id
           << " hash=" << Hex16(running.request_hash) << " prompt=" << running.num_prompt_tokens
           << " max_tokens=" << request.max_tokens.value_or(0)
           << " seed=" << static_cast<int64_t>(request.sampling.seed);

  SequenceSpec spec;
  spec.request_hash = running.request_hash;
  spec.prompt_ids = std::move(request.prompt_ids);
  spec.sampling = std::move(request.sampling);
  spec.max_tokens = request.max_tokens.value_or(0);
  spec.max_drafts = request.max_drafts.value_or(-1);
  spec.run_ahead_allowed = !request.has_stop_strings;
  absl::Status status;
  if (group_ == nullptr && config_.recovery_timeout_ms == 0) {
    status = absl::UnavailableError("engine_restarting: the epoch ended");
  } else {
    status = scheduler_.Add(message.id, std::move(spec), running.accept_us);
  }
  const auto [it, inserted] = running_.emplace(message.id, std::move(running));
  CHECK(inserted);
  if (status.ok()) return;
  EndRequest(message.id, "error", [&](GenerateEvents& events) { events.OnError(status); });
}

void EngineLoop::Handle(EndMessage message) {
  scheduler_.End(message.id, message.reason);
}

void EngineLoop::Handle(ResultMessage message) {
  if (group_ == nullptr || group_->epoch() != message.epoch) return;
  const uint64_t op_id = message.result.result.op_id;
  const auto op = std::find_if(in_flight_.begin(), in_flight_.end(),
                               [&](const OpInFlight& o) { return o.plan.op_id == op_id; });
  if (op == in_flight_.end() || op->results[static_cast<size_t>(message.rank)].has_value()) {
    EndEpoch("protocol", absl::StrCat("rank ", message.rank, " answered op ", op_id,
                                      ", which is not in flight"));
    return;
  }
  // Only a refusal by name, alike on all ranks, leaves the workers' state as it was.
  if (!message.result.status.ok() && !absl::IsUnimplemented(message.result.status)) {
    EndEpoch(absl::IsDeadlineExceeded(message.result.status) ? "deadline" : "op_failed",
             absl::StrCat("rank ", message.rank, " failed op ", op_id, ": ",
                          message.result.status.ToString()));
    return;
  }
  op->results[static_cast<size_t>(message.rank)] = std::move(message.result);
  while (!in_flight_.empty() &&
         std::all_of(in_flight_.front().results.begin(), in_flight_.front().results.end(),
                     [](const auto& result) { return result.has_value(); })) {
    CompleteFrontOp();
  }
}

// Every rank has answered: compare first, use the tokens afterwards.
void EngineLoop::CompleteFrontOp() {
  const OpInFlight op = std::move(in_flight_.front());
  in_flight_.pop_front();
  const RankResult& rank0 = *op.results[0];
  for (size_t rank = 1; rank < op.results.size(); ++rank) {
    if (op.results[rank]->status != rank0.status) {
      EndEpoch("op_failed", absl::StrCat("the ranks disagree about op ", op.plan.op_id, ": ",
                                         rank0.status.ToString(), " on rank 0, ",
                                         op.results[rank]->status.ToString(), " on rank ", rank));
      return;
    }
    if (op.results[rank]->digest == rank0.digest) continue;
    metrics_.OnDivergence();
    EndEpoch("divergence",
             absl::StrCat("the ranks computed different results for op ", op.plan.op_id,
                          ": digest ", Hex16(rank0.digest), " on rank 0, ",
                          Hex16(op.results[rank]->digest), " on rank ", rank));
    return;
  }
  const int64_t now_us = clock_.NowUs();
  metrics_.OnStep(
      op.plan,
      {Seconds(op.start_us, now_us), Seconds(0, op.gateway_us), op.plan.deadline_ms * 1e-3}, rank0);
  // The next op could not start before: its time counts from here.
  if (!in_flight_.empty()) {
    OpInFlight& next = in_flight_.front();
    next.start_us = now_us;
    next.deadline_us = now_us + int64_t{next.plan.deadline_ms} * 1000;
  } else {
    workers_free_us_ = now_us;
  }
  if (!rank0.status.ok()) {
    LOG_WARNING << "op refused op=" << op.plan.op_id << " reason=\"" << rank0.status.ToString()
                << '"';
    const absl::Status taken = scheduler_.ApplyRefusal(op.plan.op_id, rank0.status);
    if (!taken.ok()) {
      EndEpoch("op_failed",
               absl::StrCat("all ranks refused op ", op.plan.op_id, ": ", rank0.status.ToString()));
    }
    return;
  }
  const absl::Status status = scheduler_.Apply(rank0.result);
  if (!status.ok()) EndEpoch("protocol", std::string(status.message()));
}

void EngineLoop::Handle(const LostMessage& message) {
  if (group_ != nullptr && group_->epoch() == message.epoch) {
    EndEpoch(message.cause, message.reason);
  }
}

void EngineLoop::Handle(ReadyMessage message) {
  CHECK(group_ == nullptr);
  group_ = std::move(message.group);
  monitor_.Watch(group_);
  recovery_deadline_us_ = 0;
  for (const CostEntry& cost : message.costs) {
    scheduler_.PresetCost(cost.is_prefill, cost.rows, cost.ms);
  }
  scheduler_.BeginEpoch(message.limits);
  {
    std::lock_guard lock(mutex_);
    serving_ = true;
    ever_served_ = true;
    limits_ = message.limits;
    if (!draining_) state_since_us_ = clock_.NowUs();
  }
  PublishStatus(/*force=*/true);
  PublishMetrics(/*force=*/true);
}

void EngineLoop::Handle(const AbortAllMessage& message) {
  FailRequests(message.error);
}

// The results that came meanwhile may still lie unread: there is time to read them in any case.
void EngineLoop::ExtendDeadline(int64_t turn_us) {
  if (turn_us < kReadLateUs || in_flight_.empty()) return;
  int64_t& deadline_us = in_flight_.front().deadline_us;
  deadline_us = std::max(deadline_us + turn_us, last_turn_us_.load() + kReadLateUs);
}

void EngineLoop::CheckDeadlines() {
  const int64_t now_us = clock_.NowUs();
  if (group_ != nullptr && !in_flight_.empty() && now_us > in_flight_.front().deadline_us) {
    const OpInFlight& op = in_flight_.front();
    std::string missing;
    for (size_t rank = 0; rank < op.results.size(); ++rank) {
      if (!op.results[rank]) absl::StrAppend(&missing, missing.empty() ? "" : ", ", rank);
    }
    EndEpoch("deadline", absl::StrCat("op ", op.plan.op_id, " was not finished within ",
                                      op.plan.deadline_ms, " ms by rank ", missing));
  }
  if (group_ == nullptr && recovery_deadline_us_ > 0 && now_us > recovery_deadline_us_) {
    recovery_deadline_us_ = 0;
    FailRequests(absl::UnavailableError(
        absl::StrCat("engine_restarting: no new epoch within RECOVERY_TIMEOUT = ",
                     config_.recovery_timeout_ms / 1000, " s")));
  }
}

// Some ranks have answered the front op and some have not.
bool EngineLoop::AwaitsOtherRanks() const {
  if (in_flight_.empty()) return false;
  const auto& results = in_flight_.front().results;
  return std::any_of(results.begin(), results.end(),
                     [](const auto& result) { return result.has_value(); });
}

void EngineLoop::SendSteps() {
  if (group_ == nullptr) return;
  while (std::optional<StepPlan> plan = scheduler_.NextStep(clock_.NowUs())) {
    const std::string bytes = EncodeOp(*plan);
    CHECK_LE(bytes.size(), limits::kMaxMessageBytes) << "op " << plan->op_id;
    group_->SendOp(bytes);
    OpInFlight op;
    op.start_us = clock_.NowUs();
    if (in_flight_.empty() && workers_free_us_ > 0) op.gateway_us = op.start_us - workers_free_us_;
    op.deadline_us = op.start_us + int64_t{plan->deadline_ms} * 1000;
    op.results.resize(static_cast<size_t>(group_->world()));
    op.plan = *std::move(plan);
    in_flight_.push_back(std::move(op));
  }
  workers_free_us_ = 0;
}

void EngineLoop::EndEpoch(const std::string& cause, const std::string& reason) {
  const uint64_t epoch = group_->epoch();
  const std::string text = absl::StrCat("epoch ", epoch, " ended: ", reason);
  LOG_ERROR << text << " cause=" << cause;
  metrics_.OnEpochEnd(cause);
  {
    std::lock_guard lock(mutex_);
    serving_ = false;
    last_epoch_end_ = text;
    ++snapshot_.num_epochs_ended;
    if (cause == "divergence") ++snapshot_.num_divergences;
    if (!draining_) state_since_us_ = clock_.NowUs();
  }
  in_flight_.clear();
  scheduler_.EndEpoch();
  if (config_.recovery_timeout_ms == 0) {
    FailRequests(absl::UnavailableError(absl::StrCat("engine_restarting: ", text)));
  } else {
    recovery_deadline_us_ = clock_.NowUs() + config_.recovery_timeout_ms * 1000;
    DeliverEvents();
  }
  monitor_.Watch(nullptr);
  group_.reset();  // ends the streams: the workers that live go back to IDLE
  epochs_.EpochEnded(cause == "divergence");
  PublishStatus(/*force=*/true);
  PublishMetrics(/*force=*/true);
}

void EngineLoop::FailRequests(const absl::Status& error) {
  DeliverEvents();
  scheduler_.FailAll(error);
  DeliverEvents();
}

// ---- Events ------------------------------------------------------------------------------------

void EngineLoop::DeliverEvents() {
  for (SequenceEvent& event : scheduler_.TakeEvents()) {
    const auto it = running_.find(event.sequence_id);
    CHECK(it != running_.end()) << "event of request " << event.sequence_id;
    Deliver(event, it->second);
  }
}

void EngineLoop::Deliver(SequenceEvent& event, Running& running) {
  const GenerateId id = event.sequence_id;
  switch (event.kind) {
    case SequenceEvent::Kind::kAdmitted: {
      running.admit_us = clock_.NowUs();
      running.admitted = true;
      {
        std::lock_guard lock(mutex_);
        --num_queued_;
      }
      running.events->OnAdmitted();
      break;
    }
    case SequenceEvent::Kind::kPromptLogprobs:
      running.events->OnPromptLogprobs(std::move(event.logprobs));
      break;
    case SequenceEvent::Kind::kTokens:
      DeliverTokens(event, running);
      break;
    case SequenceEvent::Kind::kEnded: {
      FinishInfo info;
      const bool length = event.end_reason == EndReason::kLength;
      const bool abort = event.end_reason == EndReason::kCancelled;
      info.reason = length  ? FinishReason::kLength
                    : abort ? FinishReason::kAbort
                            : FinishReason::kStop;
      if (event.end_reason == EndReason::kStopToken) info.stop_token_id = event.stop_token_id;
      info.num_prompt_tokens = event.num_prompt_ids;
      info.num_completion_tokens = event.num_emitted;
      info.num_preemptions = event.num_preemptions;
      EndRequest(id,
                 length  ? "length"
                 : abort ? "abort"
                         : "stop",
                 [&](GenerateEvents& events) { events.OnFinish(info); });
      break;
    }
    case SequenceEvent::Kind::kFailed:
      EndRequest(id, "error", [&](GenerateEvents& events) { events.OnError(event.error); });
      break;
  }
}

void EngineLoop::DeliverTokens(const SequenceEvent& event, Running& running) {
  const int64_t now_us = clock_.NowUs();
  if (running.first_token_us == 0) {
    running.first_token_us = now_us;
    metrics_.OnFirstToken(Seconds(running.accept_us, now_us));
  } else {
    metrics_.OnNextTokens(Seconds(running.last_token_us, now_us));
  }
  running.last_token_us = now_us;
  running.num_emitted += static_cast<int32_t>(event.tokens.size());
  running.events->OnTokens(event.tokens, event.logprobs);
}

void EngineLoop::EndRequest(GenerateId id,
                            const char* reason,
                            const std::function<void(GenerateEvents&)>& last_event) {
  const auto it = running_.find(id);
  const Running running = std::move(it->second);
  running_.erase(it);
  const int64_t now_us = clock_.NowUs();
  RequestTimes times;
  times.queue_s = PhaseSeconds(running.accept_us, running.admit_us);
  times.prefill_s = PhaseSeconds(running.admit_us, running.first_token_us);
  times.decode_s = PhaseSeconds(running.first_token_us, running.last_token_us);
  times.e2e_s = Seconds(running.accept_us, now_us);
  metrics_.OnEnd(reason, times, running.num_prompt_tokens, running.num_emitted);
  LOG_INFO << "request ended id=" << running.request_id << " hash=" << Hex16(running.request_hash)
           << " reason=" << reason << " prompt=" << running.num_prompt_tokens
           << " output=" << running.num_emitted
           << " ttft_ms=" << 1e3 * PhaseSeconds(running.accept_us, running.first_token_us)
           << " e2e_ms=" << 1e3 * times.e2e_s;
  last_event(*running.events);
  // Counted as running until here: Drain returns when every request has heard its last event.
  std::lock_guard lock(mutex_);
  if (!running.admitted) --num_queued_;
  if (--num_requests_ == 0) idle_changed_.notify_all();
}

void EngineLoop::PublishStatus(bool force) {
  const int64_t now_us = clock_.NowUs();
  if (!force && now_us - published_us_ < kPublishUs) return;
  published_us_ = now_us;
  const SchedulerCounters& counters = scheduler_.counters();
  std::lock_guard lock(mutex_);
  EngineStatus& status = snapshot_;
  status.limits.num_slots = limits_.num_slots;
  status.limits.num_pages = limits_.num_pages;
  status.limits.page_tokens = limits::kPageTokens;
  status.limits.max_context = limits_.max_context;
  status.limits.max_output_default = config_.scheduler.max_output_default;
  status.limits.max_queue = static_cast<int32_t>(config_.scheduler.max_queue);
  status.limits.vocab_size = limits_.vocab_size;
  status.limits.num_drafts = std::min(config_.scheduler.num_drafts, limits_.max_drafts);
  status.num_running = scheduler_.num_running();
  status.num_waiting = scheduler_.num_waiting();
  status.num_prefilling = scheduler_.num_prefilling();
  status.pages_used = scheduler_.pages_used();
  status.num_ops = counters.num_ops;
  status.num_rounds = counters.num_rounds;
  status.num_drafted = counters.num_drafted;
  status.num_accepted = counters.num_accepted;
  status.num_preemptions = counters.num_preemptions;
}

void EngineLoop::PublishMetrics(bool force) {
  const int64_t now_us = clock_.NowUs();
  if (!force && now_us - metrics_us_ < kMetricsUs) return;
  metrics_us_ = now_us;
  metrics_.Publish(GetStatus(), scheduler_.counters());
}

}  // namespace twinspark::gateway
