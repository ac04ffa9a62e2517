#include "gateway/engine/epoch_manager.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "common/build_info.h"
#include "common/ids.h"
#include "common/limits.h"
#include "common/log.h"
#include "common/status_macros.h"

namespace twinspark::gateway {
namespace {

constexpr int64_t kHelloDeadlineMs = 1000;
constexpr int64_t kPrepareDeadlineMs = 5000;
constexpr int64_t kOpenDeadlineMs = 5000;
constexpr int64_t kSayEveryUs = 15'000'000;

std::string RankName(const WorkerClient& client) {
  return absl::StrCat("rank ", client.rank(), " (", client.endpoint(), ")");
}

// A difference that trying again does not mend is FAILED_PRECONDITION.
absl::Status Mismatch(std::string_view what,
                      const std::string& a_name,
                      const std::string& a,
                      const std::string& b_name,
                      const std::string& b) {
  return absl::FailedPreconditionError(
      absl::StrCat(std::string(what), " differ: ", a_name, " has '", a, "', ", b_name, " has '", b,
                   "'; start the same build and model everywhere"));
}

// The best SIMD target of rank 0 that every other rank has too; empty when there are none (GPUs).
absl::StatusOr<std::string> CommonSimdTarget(const std::vector<WorkerHello>& hellos) {
  if (hellos[0].simd_targets.empty()) return std::string();
  for (const std::string& target : hellos[0].simd_targets) {
    const bool everywhere =
        std::all_of(hellos.begin(), hellos.end(), [&](const WorkerHello& hello) {
          const auto& targets = hello.simd_targets;
          return std::find(targets.begin(), targets.end(), target) != targets.end();
        });
    if (everywhere) return target;
  }
  return absl::FailedPreconditionError(
      "the workers' processors have no SIMD target in common; set SIMD_TARGET on all of them");
}

// What a worker found to differ when it met its peer or its row service; every other precondition
// may hold at the next attempt.
bool IsMismatch(const absl::Status& refused) {
  return absl::IsFailedPrecondition(refused) &&
         (absl::StrContains(refused.message(), "digest differs") ||
          absl::StrContains(refused.message(), "this worker's model has"));
}

EpochLimits SmallerOf(const EpochLimits& a, const EpochLimits& b) {
  EpochLimits out = a;
  out.num_slots = std::min(a.num_slots, b.num_slots);
  out.num_pages = std::min(a.num_pages, b.num_pages);
  out.max_round_rows = std::min(a.max_round_rows, b.max_round_rows);
  out.max_short_prefill_rows = std::min(a.max_short_prefill_rows, b.max_short_prefill_rows);
  out.max_chunk_rows = std::min(a.max_chunk_rows, b.max_chunk_rows);
  out.max_context = std::min(a.max_context, b.max_context);
  out.max_drafts = std::min({a.max_drafts, b.max_drafts, limits::kMaxDrafts});
  return out;
}

absl::Status CheckLimits(const EpochLimits& granted) {
  if (granted.num_slots < 1 || granted.num_slots > limits::kMaxSlots || granted.num_pages < 1 ||
      granted.max_context < 1 || granted.max_round_rows < 1 + limits::kMaxDrafts ||
      granted.max_short_prefill_rows < granted.max_round_rows || granted.max_chunk_rows < 1) {
    return absl::InternalError(
        absl::StrCat("unusable limits were granted: slots ", granted.num_slots, ", pages ",
                     granted.num_pages, ", context ", granted.max_context, ", round rows ",
                     granted.max_round_rows, ", prefill rows ", granted.max_short_prefill_rows,
                     ", chunk rows ", granted.max_chunk_rows));
  }
  return absl::OkStatus();
}

}  // namespace

EpochManager::EpochManager(const EpochManagerConfig& config,
                           const std::vector<std::unique_ptr<WorkerClient>>& clients,
                           const Clock& clock,
                           WorkerBoard& board,
                           EngineInbox& inbox,
                           FatalCallback on_fatal)
    : config_(config),
      clients_(clients),
      clock_(clock),
      board_(board),
      inbox_(inbox),
      on_fatal_(std::move(on_fatal)),
      last_progress_us_(clock.NowUs()),
      thread_([this] { Run(); }) {}

EpochManager::~EpochManager() {
  Stop();
}

void EpochManager::Stop() {
  if (!thread_.joinable()) return;
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  // Calls that start after this see stop_ before they block.
  for (const auto& client : clients_)
    client->Cancel();
  thread_.join();
}

void EpochManager::EpochEnded(bool diverged) {
  {
    std::lock_guard lock(mutex_);
    needed_ = true;
    reload_weights_ = reload_weights_ || diverged;
  }
  changed_.notify_all();
}

EpochFacts EpochManager::Facts() const {
  std::lock_guard lock(mutex_);
  return facts_;
}

bool EpochManager::Sleep(int64_t ms) {
  std::unique_lock lock(mutex_);
  changed_.wait_for(lock, std::chrono::milliseconds(ms), [this] { return stop_; });
  return stop_;
}

void EpochManager::Run() {
  int64_t backoff_ms = limits::kReconnectBackoffMsMin;
  while (true) {
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [this] { return stop_ || needed_; });
      if (stop_) return;
    }
    absl::StatusOr<Setup> setup = TrySetUp();
    const int64_t now_us = clock_.NowUs();
    if (setup.ok()) {
      {
        std::lock_guard lock(mutex_);
        needed_ = false;
        reload_weights_ = false;
        facts_.ever_ready = true;
        facts_.waiting_for.clear();
      }
      LOG_INFO << "epoch ready epoch=" << setup->group->epoch() << " world=" << clients_.size()
               << " slots=" << setup->limits.num_slots << " pages=" << setup->limits.num_pages
               << " context=" << setup->limits.max_context
               << " drafts=" << setup->limits.max_drafts;
      backoff_ms = limits::kReconnectBackoffMsMin;
      const std::shared_ptr<WorkerGroup> group = setup->group;
      inbox_.Push(ReadyMessage{group, setup->limits, std::move(setup->costs)});
      group->StartServing();
      continue;
    }
    if (Sleep(0)) return;  // what was called off says nothing about the workers
    const std::string reason(setup.status().message());
    SayWaiting(reason, now_us);
    if (!Facts().ever_ready) {
      if (absl::IsFailedPrecondition(setup.status())) return on_fatal_(kExitMismatch, reason);
      if (absl::IsDataLoss(setup.status())) return on_fatal_(kExitBadData, reason);
      if (RanOutOfTime(now_us)) {
        return on_fatal_(kExitUnavailable,
                         absl::StrCat("gave up after RENDEZVOUS_TIMEOUT = ",
                                      config_.rendezvous_timeout_ms / 1000, " s: ", reason));
      }
    }
    // Who is not there yet is asked again soon; what failed while it was there backs off.
    const bool absent = absl::IsUnavailable(setup.status());
    int64_t pause_ms = absent ? limits::kReconnectBackoffMsMin : backoff_ms;
    if (!Facts().ever_ready) {
      // Not past the moment at which it gives up.
      const int64_t left_ms =
          config_.rendezvous_timeout_ms - (now_us - last_progress_us_.load()) / 1000;
      pause_ms = std::clamp(left_ms + 1, int64_t{1}, pause_ms);
    }
    if (Sleep(pause_ms)) return;
    if (!absent) backoff_ms = std::min(2 * backoff_ms, limits::kReconnectBackoffMsMax);
  }
}

bool EpochManager::RanOutOfTime(int64_t now_us) const {
  return now_us - last_progress_us_.load() > config_.rendezvous_timeout_ms * 1000;
}

void EpochManager::SayWaiting(const std::string& reason, int64_t now_us) {
  {
    std::lock_guard lock(mutex_);
    facts_.waiting_for = reason;
  }
  if (reason == last_said_ && now_us - last_said_us_ < kSayEveryUs) return;
  last_said_ = reason;
  last_said_us_ = now_us;
  LOG_INFO << "waiting for workers: " << reason;
}

absl::StatusOr<EpochManager::Setup> EpochManager::TrySetUp() {
  ASSIGN_OR_RETURN(const std::vector<WorkerHello> hellos, HelloAll());

  GroupConfig group_config;
  // Never reused, also not by a gateway started later; a clock set back costs one attempt each.
  last_epoch_ = std::max(last_epoch_ + 1, static_cast<uint64_t>(UnixTimeUs() / 1000));
  group_config.epoch = last_epoch_;
  group_config.world = static_cast<int>(clients_.size());
  group_config.group_secret = absl::StrCat(Hex16(RandomU64()), Hex16(RandomU64()));
  group_config.model_dir = config_.model_dir;
  group_config.engram_dir = config_.engram_dir;
  group_config.engram_endpoints = config_.engram_endpoints;
  group_config.gateway_silence_ms = config_.gateway_silence_ms;
  group_config.wanted = config_.wanted;
  if (config_.wanted.num_slots == 0) {
    const bool on_cpu = hellos[0].backend == "cpu";
    group_config.wanted.num_slots = on_cpu ? config_.slots_on_cpu : config_.slots_on_gpu;
  }
  ASSIGN_OR_RETURN(group_config.simd_target, CommonSimdTarget(hellos));
  {
    std::lock_guard lock(mutex_);
    facts_.epoch = group_config.epoch;
    facts_.waiting_for = "they load and join";
    // After the first epoch the digests may not change any more.
    group_config.reload_weights = reload_weights_;
    group_config.expected_config_digest = facts_.config_digest;
    group_config.expected_weights_digest = facts_.weights_digest;
  }
  for (const auto& client : clients_) {
    auto endpoint =
        client->PrepareGroup(group_config.epoch, group_config.world, kPrepareDeadlineMs);
    if (!endpoint.ok()) {
      return absl::AbortedError(
          absl::StrCat(RankName(*client), " refused PrepareGroup: ", endpoint.status().ToString(),
                       "; if another gateway serves with this worker, end that one first"));
    }
    group_config.group_endpoints.push_back(*std::move(endpoint));
  }
  ASSIGN_OR_RETURN(const std::vector<WorkerReady> ready, ConfigureAll(group_config));
  RETURN_IF_ERROR(CheckAlike(ready));

  Setup setup;
  setup.limits = ready[0].granted;
  for (const WorkerReady& rank : ready)
    setup.limits = SmallerOf(setup.limits, rank.granted);
  RETURN_IF_ERROR(CheckLimits(setup.limits));
  if (setup.limits.vocab_size < config_.tokenizer_vocab_size) {
    return absl::DataLossError(absl::StrCat(
        "the tokenizer has ", config_.tokenizer_vocab_size, " ids, the model ",
        setup.limits.vocab_size, "; put the tokenizer.json of this model into MODEL_DIR"));
  }
  setup.costs = ready[0].costs;
  setup.group =
      std::make_shared<WorkerGroup>(group_config.epoch, group_config.world, clock_, inbox_);
  if (absl::Status status =
          setup.group->Open(clients_, ready[0].config_digest, ready[0].weights_digest,
                            kOpenDeadlineMs * limits::kTimeScale);
      !status.ok()) {
    return absl::AbortedError(status.message());
  }
  last_slices_.clear();
  for (const WorkerReady& rank : ready)
    last_slices_.push_back(rank.own_slices_digest);
  std::lock_guard lock(mutex_);
  facts_.config_digest = ready[0].config_digest;
  facts_.weights_digest = ready[0].weights_digest;
  return setup;
}

// UNAVAILABLE names every rank that does not answer.
absl::StatusOr<std::vector<WorkerHello>> EpochManager::HelloAll() {
  std::vector<WorkerHello> hellos;
  std::string missing;
  for (const auto& client : clients_) {
    auto hello = client->Hello(kHelloDeadlineMs);
    if (!hello.ok()) {
      board_.OnUnreachable(client->rank(), hello.status().ToString());
      absl::StrAppend(&missing, missing.empty() ? "" : "; ", RankName(*client),
                      " does not answer, start shard_worker there or correct WORKERS: ",
                      hello.status().ToString());
      if (const std::string reason = board_.LastReason(client->rank()); !reason.empty()) {
        absl::StrAppend(&missing, "; it said before: ", reason);
      }
      continue;
    }
    board_.OnHello(client->rank(), *hello);
    if (hello->protocol_version != kProtocolVersion) {
      return Mismatch("protocol versions", "the gateway", absl::StrCat(kProtocolVersion),
                      RankName(*client), absl::StrCat(hello->protocol_version));
    }
    if (hello->build != BuildId()) {
      return Mismatch("builds", "the gateway", BuildId(), RankName(*client), hello->build);
    }
    hellos.push_back(*std::move(hello));
  }
  if (!missing.empty()) return absl::UnavailableError(missing);
  return hellos;
}

// All ranks at once: they join each other. When one fails the others are called off.
absl::StatusOr<std::vector<WorkerReady>> EpochManager::ConfigureAll(const GroupConfig& config) {
  std::vector<std::optional<absl::StatusOr<WorkerReady>>> answers(clients_.size());
  std::mutex mutex;
  std::condition_variable answered;
  size_t num_answered = 0;
  bool failed = false;
  bool mismatch = false;
  std::string first_error;
  const int64_t started_us = clock_.NowUs();
  std::vector<std::thread> threads;
  for (size_t rank = 0; rank < clients_.size(); ++rank) {
    threads.emplace_back([&, rank] {
      WorkerClient& client = *clients_[rank];
      uint64_t bytes_done = 0;
      auto ready = client.Configure(config, [&](const ConfigureProgress& progress) {
        board_.OnProgress(client.rank(), progress);
        if (progress.bytes_done > bytes_done) last_progress_us_.store(clock_.NowUs());
        bytes_done = progress.bytes_done;
      });
      std::lock_guard lock(mutex);
      if (!ready.ok()) {
        // The rank that a peer left says less than the one that left: a mismatch wins.
        const bool is_mismatch = IsMismatch(ready.status());
        if (!failed || (is_mismatch && !mismatch)) {
          first_error = absl::StrCat(RankName(client), ": ", ready.status().ToString());
        }
        failed = true;
        mismatch = mismatch || is_mismatch;
        board_.OnConfigureFailed(client.rank(), ready.status());
      }
      if (ready.ok()) board_.OnReady(client.rank(), *ready);
      answers[rank] = std::move(ready);
      ++num_answered;
      answered.notify_all();
    });
  }
  {
    // Called off when a rank failed, when this object stops, or when nothing moves any more.
    std::unique_lock lock(mutex);
    while (num_answered < clients_.size()) {
      answered.wait_for(lock, std::chrono::milliseconds(limits::kReconnectBackoffMsMin));
      bool stop = false;
      {
        std::lock_guard stop_lock(mutex_);
        stop = stop_;
      }
      const int64_t moved_us = std::max(started_us, last_progress_us_.load());
      const bool stuck = clock_.NowUs() - moved_us > config_.rendezvous_timeout_ms * 1000;
      if (failed || stop || stuck) {
        for (const auto& client : clients_)
          client->Cancel();
      }
    }
  }
  for (std::thread& thread : threads)
    thread.join();
  if (mismatch) {
    return absl::FailedPreconditionError(
        absl::StrCat(first_error, "; start the same build and model everywhere"));
  }
  if (failed) return absl::AbortedError(first_error);
  std::vector<WorkerReady> ready;
  for (auto& answer : answers)
    ready.push_back(**std::move(answer));
  return ready;
}

absl::Status EpochManager::CheckAlike(const std::vector<WorkerReady>& ready) const {
  const std::string first = RankName(*clients_[0]);
  for (size_t rank = 1; rank < ready.size(); ++rank) {
    const std::string other = RankName(*clients_[rank]);
    const WorkerReady& a = ready[0];
    const WorkerReady& b = ready[rank];
    if (a.config_digest != b.config_digest) {
      return Mismatch("config digests", first, a.config_digest, other, b.config_digest);
    }
    if (a.weights_digest != b.weights_digest) {
      return Mismatch("weights digests", first, a.weights_digest, other, b.weights_digest);
    }
    if (a.replicated_digest != b.replicated_digest) {
      return Mismatch("contents of replicated weights", first, a.replicated_digest, other,
                      b.replicated_digest);
    }
    if (a.engram.hash_digest != b.engram.hash_digest) {
      return Mismatch("token maps or hash parameters of the row services", first,
                      a.engram.hash_digest, other, b.engram.hash_digest);
    }
  }
  // A slice is summed into both ranks alike, so no digest of a step shows a wrong one: its contents
  // must be those of the epoch before. New weights under a running gateway are refused; they need a
  // restart of the gateway.
  for (size_t rank = 0; rank < ready.size() && rank < last_slices_.size(); ++rank) {
    if (ready[rank].own_slices_digest != last_slices_[rank]) {
      const std::string name = RankName(*clients_[rank]);
      return Mismatch("contents of a rank's own weights", name, ready[rank].own_slices_digest,
                      name + " in its last epoch", last_slices_[rank]);
    }
  }
  return absl::OkStatus();
}

}  // namespace twinspark::gateway
