// Everything the gateway asks of one shard worker: Hello, PrepareGroup, Configure, Steps, Status.
// One per rank, for the life of the process; EpochManager makes the calls that set an epoch up,
// WorkerMonitor polls. Blocking calls take at most as long as their deadline; what Steps and polls
// bring arrives on the CompletionLoop. Thread-safe.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "gateway/engine/completion_loop.h"
#include "gateway/engine/step_stream_client.h"
#include "gateway/engine/worker_types.h"

namespace twinspark::gateway {

inline constexpr uint32_t kProtocolVersion = 1;

class WorkerClient {
 public:
  // `completions` must outlive it, and what the callbacks of polls use must outlive `completions`.
  WorkerClient(int rank, const std::string& endpoint, CompletionLoop& completions);
  ~WorkerClient();
  WorkerClient(const WorkerClient&) = delete;
  WorkerClient& operator=(const WorkerClient&) = delete;

  int rank() const { return rank_; }
  const std::string& endpoint() const { return endpoint_; }

  absl::StatusOr<WorkerHello> Hello(int64_t deadline_ms);
  absl::StatusOr<std::string> PrepareGroup(uint64_t epoch, int world, int64_t deadline_ms);

  // Blocks until the worker is READY or says why not; no deadline (a load takes minutes): progress
  // is reported, Cancel ends it.
  absl::StatusOr<WorkerReady> Configure(
      const GroupConfig& config, const std::function<void(const ConfigureProgress&)>& on_progress);

  // Opens Steps; events->OnAccepted or OnClosed follows. `events` must outlive the stream.
  std::unique_ptr<StepStream> OpenSteps(uint64_t epoch,
                                        const std::string& config_digest,
                                        const std::string& weights_digest,
                                        StepStreamEvents* events);

  // Answers on the thread of the CompletionLoop. Only the fields that StatusReply has are set.
  void PollStatus(int64_t deadline_ms, std::function<void(absl::StatusOr<WorkerStatus>)> on_status);

  // Calls off what is running now (not Steps).
  void Cancel();

 private:
  struct Impl;
  const int rank_;
  const std::string endpoint_;
  const std::shared_ptr<Impl> impl_;
};

}  // namespace twinspark::gateway
