// Composition root of a shard worker: owns every part and says in which order they start and end.
//
// Start: metrics endpoint > backend (thread pool, no weights yet) > state machine > gRPC server >
// PORT_FILE. Weights, group and row service come with Configure, not before. End: the process
// leaves as soon as the state machine says so; replies on the way get a moment, nothing else needs
// one (no file, no shared name is left behind), and waiting for a load or a hung step is what must
// not happen.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"

#include "common/clock.h"
#include "common/metrics.h"
#include "common/rpc/grpc_server.h"
#include "common/settings.h"
#include "shard_worker/backend/model_backend.h"
#include "shard_worker/runtime/op_log.h"
#include "shard_worker/runtime/worker_core.h"
#include "shard_worker/service/shard_worker_service.h"
#include "shard_worker/worker_metrics.h"

namespace twinspark {

class ShardWorker {
 public:
  explicit ShardWorker(const Settings& settings);
  ~ShardWorker();

  // Listening, or why not (a bad setting, a taken port: exit code 78).
  absl::Status Start();
  const std::string& address() const { return server_->address(); }

  // SIGTERM; any thread.
  void Drain(const std::string& reason) { core_->Drain(reason); }
  // Until the worker wants to end; its exit code.
  int Wait();

 private:
  static ModelBackend::Options BackendOptions(const Settings& settings);

  const Settings& settings_;
  const SteadyClock clock_;
  Metrics metrics_;
  WorkerMetrics worker_metrics_;
  std::optional<OpLogWriter> op_log_;
  ModelBackend backend_;

  std::mutex mutex_;
  std::condition_variable exit_wanted_;
  std::optional<int> exit_code_;

  std::unique_ptr<WorkerCore> core_;
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<grpc::Service> test_hooks_;
  std::unique_ptr<GrpcServer> server_;
};

}  // namespace twinspark
