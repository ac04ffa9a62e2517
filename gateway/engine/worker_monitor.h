// Liveness: a thread of its own that sends heartbeats to the workers of the running epoch every
// 250 ms, ends the epoch when one of them is silent, and polls every worker's Status in every
// state. It shares no lock with the engine thread's work. gRPC keepalive alone does not see a
// stopped process. Source: protocol specification 2 (liveness).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "gateway/engine/engine_inbox.h"
#include "gateway/engine/worker_board.h"
#include "gateway/engine/worker_client.h"
#include "gateway/engine/worker_group.h"

namespace twinspark::gateway {

class WorkerMonitor {
 public:
  WorkerMonitor(const std::vector<std::unique_ptr<WorkerClient>>& clients,
                int64_t worker_silence_ms,
                WorkerBoard& board,
                EngineInbox& inbox);
  ~WorkerMonitor();
  WorkerMonitor(const WorkerMonitor&) = delete;
  WorkerMonitor& operator=(const WorkerMonitor&) = delete;

  // The group to watch from now on; null: none.
  void Watch(std::shared_ptr<WorkerGroup> group);

 private:
  void Run();
  void CheckSilence(WorkerGroup& group);
  void PollWorkers();

  const std::vector<std::unique_ptr<WorkerClient>>& clients_;
  const int64_t worker_silence_ms_;
  WorkerBoard& board_;
  EngineInbox& inbox_;

  std::mutex mutex_;
  std::condition_variable changed_;
  bool stop_ = false;
  std::shared_ptr<WorkerGroup> group_;

  // Monitor thread only. Silence counts in ticks of this thread in which the engine thread ran too,
  // so that time in which the gateway itself did not run (it was stopped, or the machine was, or
  // others had the processors) is not blamed on a worker.
  std::vector<int> silent_ticks_;
  uint64_t watched_epoch_ = 0;
  uint64_t lost_epoch_ = 0;
  std::thread thread_;
};

}  // namespace twinspark::gateway
