#include "gateway/engine/worker_board.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace twinspark::gateway {

WorkerBoard::WorkerBoard(const std::vector<std::string>& endpoints,
                         const std::vector<std::string>& engram_endpoints) {
  for (size_t rank = 0; rank < endpoints.size(); ++rank) {
    WorkerStatus worker;
    worker.rank = static_cast<int32_t>(rank);
    worker.endpoint = endpoints[rank];
    worker.state = "UNREACHABLE";
    worker.engram.endpoint = engram_endpoints.at(rank);
    workers_.push_back(std::move(worker));
  }
}

void WorkerBoard::OnHello(int rank, const WorkerHello& hello) {
  std::lock_guard lock(mutex_);
  WorkerStatus& worker = workers_.at(static_cast<size_t>(rank));
  worker.state = hello.state;
  worker.host = hello.host;
  worker.build_id = hello.build;
  worker.weights_digest = hello.weights_digest;
  worker.backend = hello.backend;
  const std::string detail =
      hello.simd_targets.empty() ? hello.device_name : hello.simd_targets.front();
  if (!detail.empty()) worker.backend = absl::StrCat(hello.backend, " ", detail);
}

void WorkerBoard::OnUnreachable(int rank, const std::string& error) {
  std::lock_guard lock(mutex_);
  WorkerStatus& worker = workers_.at(static_cast<size_t>(rank));
  worker.state = "UNREACHABLE";
  worker.last_error = error;
}

void WorkerBoard::OnProgress(int rank, const ConfigureProgress& progress) {
  std::lock_guard lock(mutex_);
  WorkerStatus& worker = workers_.at(static_cast<size_t>(rank));
  worker.state = progress.state;
  worker.phase = progress.phase;
  if (!progress.current_file.empty()) {
    worker.phase = absl::StrCat(progress.phase, " ", progress.current_file, ", ",
                                progress.gb_per_second, " GB/s, ", progress.eta_seconds, " s left");
  }
  worker.progress = progress.bytes_total == 0 ? 0
                                              : static_cast<double>(progress.bytes_done) /
                                                    static_cast<double>(progress.bytes_total);
}

void WorkerBoard::OnReady(int rank, const WorkerReady& ready) {
  std::lock_guard lock(mutex_);
  WorkerStatus& worker = workers_.at(static_cast<size_t>(rank));
  worker.state = "READY";
  worker.last_reason.clear();
  worker.phase.clear();
  worker.progress = 1;
  worker.weights_digest = ready.weights_digest;
  worker.memory_bytes = ready.memory_bytes;
  const std::string endpoint = worker.engram.endpoint;
  worker.engram = ready.engram;
  worker.engram.endpoint = endpoint;
}

void WorkerBoard::OnConfigureFailed(int rank, const absl::Status& status) {
  std::lock_guard lock(mutex_);
  WorkerStatus& worker = workers_.at(static_cast<size_t>(rank));
  worker.last_error = status.ToString();
  // Called off because of another rank: that one has the reason.
  if (!absl::IsCancelled(status)) worker.last_reason = worker.last_error;
}

void WorkerBoard::OnPoll(int rank, const absl::StatusOr<WorkerStatus>& status) {
  std::lock_guard lock(mutex_);
  WorkerStatus& worker = workers_.at(static_cast<size_t>(rank));
  if (!status.ok()) {
    worker.state = "UNREACHABLE";
    worker.last_error = status.status().ToString();
    return;
  }
  WorkerStatus fresh = *status;
  fresh.rank = worker.rank;
  fresh.endpoint = worker.endpoint;
  fresh.backend = worker.backend;
  fresh.heartbeat_age_s = worker.heartbeat_age_s;
  fresh.engram.endpoint = worker.engram.endpoint;
  fresh.last_reason = worker.last_reason;
  if (fresh.last_error.empty()) fresh.last_error = worker.last_error;
  if (fresh.memory_bytes.empty()) fresh.memory_bytes = worker.memory_bytes;
  worker = std::move(fresh);
}

void WorkerBoard::OnHeartbeatAge(int rank, double age_s) {
  std::lock_guard lock(mutex_);
  workers_.at(static_cast<size_t>(rank)).heartbeat_age_s = age_s;
}

std::string WorkerBoard::LastReason(int rank) const {
  std::lock_guard lock(mutex_);
  return workers_.at(static_cast<size_t>(rank)).last_reason;
}

std::vector<WorkerStatus> WorkerBoard::Snapshot() const {
  std::lock_guard lock(mutex_);
  return workers_;
}

}  // namespace twinspark::gateway
