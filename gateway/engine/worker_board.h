// What is known about each worker, for /status and the metrics: EpochManager writes what it learns
// while it sets an epoch up, WorkerMonitor what polls and heartbeats say. Thread-safe.
#pragma once

#include <mutex>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "gateway/engine/engine_status.h"
#include "gateway/engine/worker_types.h"

namespace twinspark::gateway {

class WorkerBoard {
 public:
  WorkerBoard(const std::vector<std::string>& endpoints,
              const std::vector<std::string>& engram_endpoints);

  void OnHello(int rank, const WorkerHello& hello);
  void OnUnreachable(int rank, const std::string& error);
  void OnProgress(int rank, const ConfigureProgress& progress);
  void OnReady(int rank, const WorkerReady& ready);
  // Configure failed. The reason is kept until the worker is ready: one that cannot load its model
  // says why and exits, and from then on only its absence could be seen.
  void OnConfigureFailed(int rank, const absl::Status& status);
  void OnPoll(int rank, const absl::StatusOr<WorkerStatus>& status);
  void OnHeartbeatAge(int rank, double age_s);

  std::vector<WorkerStatus> Snapshot() const;
  std::string LastReason(int rank) const;

 private:
  mutable std::mutex mutex_;
  std::vector<WorkerStatus> workers_;
};

}  // namespace twinspark::gateway
