#include "gateway/engine/worker_monitor.h"

#include <chrono>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/limits.h"

namespace twinspark::gateway {
namespace {

constexpr int kTicksPerPoll = limits::kStatusPollMs / limits::kHeartbeatPeriodMs;
static_assert(kTicksPerPoll >= 1);

}  // namespace

WorkerMonitor::WorkerMonitor(const std::vector<std::unique_ptr<WorkerClient>>& clients,
                             int64_t worker_silence_ms,
                             WorkerBoard& board,
                             EngineInbox& inbox)
    : clients_(clients),
      worker_silence_ms_(worker_silence_ms),
      board_(board),
      inbox_(inbox),
      thread_([this] { Run(); }) {}

WorkerMonitor::~WorkerMonitor() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void WorkerMonitor::Watch(std::shared_ptr<WorkerGroup> group) {
  // The old group ends up in the parameter, which outlives the lock.
  std::lock_guard lock(mutex_);
  group_.swap(group);
}

void WorkerMonitor::Run() {
  for (int tick = 0;; ++tick) {
    std::shared_ptr<WorkerGroup> group;
    {
      std::unique_lock lock(mutex_);
      changed_.wait_for(lock, std::chrono::milliseconds(limits::kHeartbeatPeriodMs),
                        [this] { return stop_; });
      if (stop_) return;
      group = group_;
    }
    if (group != nullptr) {
      group->SendHeartbeats();
      CheckSilence(*group);
    }
    if (tick % kTicksPerPoll == 0) PollWorkers();
  }
}

void WorkerMonitor::CheckSilence(WorkerGroup& group) {
  if (watched_epoch_ != group.epoch()) {
    watched_epoch_ = group.epoch();
    silent_ticks_.assign(static_cast<size_t>(group.world()), 0);
  }
  for (int rank = 0; rank < group.world(); ++rank) {
    const int64_t silence_ms = group.SilenceUs(rank) / 1000;
    board_.OnHeartbeatAge(rank, static_cast<double>(silence_ms) / 1000);
    int& ticks = silent_ticks_[static_cast<size_t>(rank)];
    if (silence_ms < limits::kHeartbeatPeriodMs) {
      ticks = 0;
    } else if (inbox_.UnreadUs() < kReadLateUs) {
      ++ticks;
    }
    if (silence_ms < worker_silence_ms_ ||
        (ticks + 1) * limits::kHeartbeatPeriodMs < worker_silence_ms_) {
      continue;
    }
    if (lost_epoch_ == group.epoch()) continue;  // said already
    lost_epoch_ = group.epoch();
    inbox_.Push(LostMessage{
        group.epoch(), "silent",
        absl::StrCat("rank ", rank, " (", clients_[static_cast<size_t>(rank)]->endpoint(),
                     ") was silent for ", silence_ms, " ms, the limit is ", worker_silence_ms_)});
  }
}

void WorkerMonitor::PollWorkers() {
  for (const auto& client : clients_) {
    client->PollStatus(2 * limits::kStatusPollMs,
                       [board = &board_, rank = client->rank()](
                           absl::StatusOr<WorkerStatus> status) { board->OnPoll(rank, status); });
  }
}

}  // namespace twinspark::gateway
