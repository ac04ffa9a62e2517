// The worker's end of one Steps stream: messages in, results and heartbeats out. gRPC calls it on
// its own threads, where nothing may block; the sender thread of the epoch calls it through
// StepsSink. At most one write is in flight, the others wait in a bounded queue. Deletes itself
// when gRPC says that the call is over (OnDone), which happens only after Finish.
#pragma once

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include "proto/shard_worker.pb.h"
#include "shard_worker/runtime/worker_core.h"

namespace twinspark {

grpc::ServerBidiReactor<proto::GatewayMessage, proto::WorkerMessage>* NewStepsReactor(
    WorkerCore& core, grpc::CallbackServerContext* context);

}  // namespace twinspark
