// The engine put together: inbox, workers' clients, monitor, epochs and loop, in the order in which
// they depend on each other. The composition root makes one; so do the engine's tests.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "common/clock.h"
#include "common/metrics.h"
#include "gateway/engine/completion_loop.h"
#include "gateway/engine/engine_inbox.h"
#include "gateway/engine/engine_loop.h"
#include "gateway/engine/epoch_manager.h"
#include "gateway/engine/worker_board.h"
#include "gateway/engine/worker_client.h"
#include "gateway/engine/worker_monitor.h"

namespace twinspark::gateway {

struct EngineOptions {
  std::vector<std::string> worker_endpoints;  // by rank
  EpochManagerConfig epochs;
  EngineConfig engine;
  int64_t worker_silence_ms = 1000;
};

class Engine {
 public:
  // Starts its threads; workers need not be there yet. `clock` and `metrics` must outlive it.
  Engine(const EngineOptions& options,
         const Clock& clock,
         Metrics& metrics,
         EpochManager::FatalCallback on_fatal);
  ~Engine();

  // From now on the workers are asked; until then the engine waits for them. Called once, after
  // everything else of the process has started.
  void Begin() { epochs_->Begin(); }

  GenerateService& service() { return *loop_; }
  // See EngineLoop::Drain.
  void Drain(int64_t timeout_ms) { loop_->Drain(timeout_ms); }

 private:
  // Destroyed from the last to the first: the loop ends its epoch and lets go of everything below,
  // then completions_ handles the last answers, so the board outlives it.
  WorkerBoard board_;
  CompletionLoop completions_;
  EngineInbox inbox_;
  std::vector<std::unique_ptr<WorkerClient>> clients_;
  std::unique_ptr<WorkerMonitor> monitor_;
  std::unique_ptr<EpochManager> epochs_;
  std::unique_ptr<EngineLoop> loop_;
};

}  // namespace twinspark::gateway
