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
  void OnError(int rank, const std::string& error);
  void OnPoll(int rank, const absl::StatusOr<WorkerStatus>& status);
  void OnHeartbeatAge(int rank, double age_s);

  std::vector<WorkerStatus> Snapshot() const;

 private:
  mutable std::mutex mutex_;
  std::vector<WorkerStatus> workers_;
};

}  // namespace twinspark::gateway
