// The gRPC face of a shard worker: proto in, plain structs out, nothing else. Steps uses the
// callback API (steps_reactor); the other calls are synchronous: Configure, Drain and Reset block
// their own thread for as long as the work takes. Thread-safe.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <grpcpp/impl/service_type.h>

#include "shard_worker/runtime/worker_core.h"

namespace twinspark {

struct ProcessFacts {
  std::string build;
  std::string host;
  std::string boot_id;
  uint32_t pid = 0;
  int64_t start_unix_ms = 0;

  // Of this process.
  static ProcessFacts Own();
};

inline constexpr uint32_t kWorkerProtocolVersion = 1;

// `core` is borrowed and must outlive the server that the services are registered with.
std::unique_ptr<grpc::Service> NewShardWorkerService(WorkerCore& core, const ProcessFacts& process);
std::unique_ptr<grpc::Service> NewTestHooksService(WorkerCore& core);

}  // namespace twinspark
