// The gRPC side of StepStream, for step_stream_client.cc and worker_client.cc only: it brings
// generated types and gRPC with it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>

#include <google/protobuf/arena.h>
#include <grpcpp/client_context.h>

#include "gateway/engine/completion_loop.h"
#include "gateway/engine/step_stream_client.h"
#include "proto/shard_worker.grpc.pb.h"

namespace twinspark::gateway {

// A call of Steps. What is under way on the completion loop holds it, so it may outlive the stream.
class StepsCall : public std::enable_shared_from_this<StepsCall> {
 public:
  static constexpr size_t kMaxQueuedHeartbeats = 8;

  StepsCall(int rank, CompletionLoop& completions, StepStreamEvents* events);

  void Start(proto::ShardWorker::Stub& stub, proto::GatewayMessage open);
  void Send(proto::GatewayMessage message);
  // See StepStream::ReadOn.
  void ReadOn();
  void Cancel();
  // No event is under way or comes after it returns.
  void Silence();

 private:
  // One kind of operation, at most once under way.
  class Operation : public Completion {
   public:
    explicit Operation(void (StepsCall::*done)(bool ok)) : done_(done) {}
    void OnComplete(bool ok) override {
      const std::shared_ptr<StepsCall> call = std::move(call_);
      (call.get()->*done_)(ok);
    }
    // The tag to start it with.
    Completion* For(const std::shared_ptr<StepsCall>& call) {
      call_ = call;
      return call->completions_.Started(this);
    }

   private:
    void (StepsCall::*const done_)(bool ok);
    std::shared_ptr<StepsCall> call_;
  };

  void OnStarted(bool ok);
  void OnRead(bool ok);
  void OnWritten(bool ok);
  void OnFinished(bool ok);
  void Read();
  void Finish();
  // Requires mutex_.
  void WriteFront();

  const int rank_;
  CompletionLoop& completions_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientAsyncReaderWriter<proto::GatewayMessage, proto::WorkerMessage>>
      stream_;
  Operation start_{&StepsCall::OnStarted};
  Operation read_{&StepsCall::OnRead};
  Operation write_{&StepsCall::OnWritten};
  Operation finish_{&StepsCall::OnFinished};
  // A message is read into memory of its own call, used again for the next one.
  alignas(16) std::array<char, 4096> arena_block_;
  google::protobuf::Arena arena_;
  proto::WorkerMessage* incoming_ = nullptr;
  grpc::Status status_;

  std::mutex events_mutex_;  // held while an event is called
  StepStreamEvents* events_;

  std::mutex mutex_;
  std::deque<proto::GatewayMessage> outgoing_;  // the front one is being written
  bool read_is_held_ = false;                   // the last message was a result
  bool started_ = false;
  bool over_ = false;  // no more writes
};

class GrpcStepStream final : public StepStream {
 public:
  GrpcStepStream(int rank,
                 proto::ShardWorker::Stub& stub,
                 CompletionLoop& completions,
                 proto::GatewayMessage open,
                 StepStreamEvents* events);
  ~GrpcStepStream() override;

  void SendOp(const std::string& op_bytes) override;
  void SendHeartbeat(uint64_t sequence) override;
  void ReadOn() override { call_->ReadOn(); }
  void Close() override;

 private:
  const std::shared_ptr<StepsCall> call_;
  std::atomic<bool> op_was_sent_{false};  // since the last SendHeartbeat
};

}  // namespace twinspark::gateway
