#include "gateway/engine/engine.h"

#include <utility>

#include "common/check.h"

namespace twinspark::gateway {

Engine::Engine(const EngineOptions& options,
               const Clock& clock,
               Metrics& metrics,
               EpochManager::FatalCallback on_fatal)
    : board_(options.worker_endpoints, options.epochs.engram_endpoints), inbox_(completions_) {
  CHECK(!options.worker_endpoints.empty());
  CHECK_EQ(options.worker_endpoints.size(), options.epochs.engram_endpoints.size());
  for (size_t rank = 0; rank < options.worker_endpoints.size(); ++rank) {
    clients_.push_back(std::make_unique<WorkerClient>(
        static_cast<int>(rank), options.worker_endpoints[rank], completions_));
  }
  monitor_ = std::make_unique<WorkerMonitor>(clients_, options.worker_silence_ms, board_, inbox_);
  epochs_ = std::make_unique<EpochManager>(options.epochs, clients_, clock, board_, inbox_,
                                           std::move(on_fatal));
  loop_ = std::make_unique<EngineLoop>(options.engine, clock, inbox_, *epochs_, *monitor_, board_,
                                       metrics);
}

Engine::~Engine() {
  epochs_->Stop();  // while the loop still runs: opening streams are heard by it
}

}  // namespace twinspark::gateway
