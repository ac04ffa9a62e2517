// The gRPC side of StepStream, for step_stream_client.cc and worker_client.cc only: it brings
// generated types and gRPC with it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

#include "gateway/engine/step_stream_client.h"
#include "proto/shard_worker.grpc.pb.h"

namespace twinspark::gateway {

class GrpcStepStream final
    : public StepStream,
      private grpc::ClientBidiReactor<proto::GatewayMessage, proto::WorkerMessage> {
 public:
  static constexpr size_t kMaxQueuedHeartbeats = 8;

  GrpcStepStream(int rank,
                 proto::ShardWorker::Stub& stub,
                 proto::GatewayMessage open,
                 StepStreamEvents* events);
  ~GrpcStepStream() override;

  void SendOp(const std::string& op_bytes) override;
  void SendHeartbeat(uint64_t sequence) override;
  void Close() override;

 private:
  void OnWriteDone(bool ok) override;
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;

  void Send(proto::GatewayMessage message);
  void ReleaseHold();

  const int rank_;
  StepStreamEvents* const events_;
  grpc::ClientContext context_;
  proto::WorkerMessage incoming_;
  std::mutex mutex_;
  std::condition_variable done_changed_;
  std::deque<proto::GatewayMessage> outgoing_;  // the front one is being written
  bool closed_ = false;                         // the hold is released: no more writes
  bool done_ = false;
};

}  // namespace twinspark::gateway
