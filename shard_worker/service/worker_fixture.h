// What the tests of this folder share: a worker with a backend of a few lines behind a real gRPC
// server on a free port, the gateway's end of a Steps stream, and small ops. Every wait has a
// bound.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include <grpcpp/client_context.h>

#include <gtest/gtest.h>

#include "common/clock.h"
#include "common/rpc/grpc_channel.h"
#include "common/rpc/grpc_server.h"
#include "common/rpc/grpc_status.h"
#include "proto/shard_worker.grpc.pb.h"
#include "shard_worker/service/shard_worker_service.h"
#include "shard_worker/testing/fake_backend.h"

namespace twinspark {

constexpr auto kPatience = std::chrono::seconds(30);  // far above what anything takes

inline bool Eventually(const std::function<bool()>& condition) {
  const auto end = std::chrono::steady_clock::now() + kPatience;
  while (std::chrono::steady_clock::now() < end) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

class ShardWorkerServiceTest : public ::testing::Test {
 protected:
  void SetUp() override { StartWorker({}); }

  void StartWorker(const WorkerCore::Options& options) {
    core_ = std::make_unique<WorkerCore>(
        options, backend_, clock_,
        [this](int code, const std::string& reason) {
          exit_reason_ = reason;
          exit_code_.store(code);
        },
        [](const GroupConfig&, const WorkerOp&, const OpOutcome&) {});
    service_ = NewShardWorkerService(*core_, ProcessFacts::Own());
    hooks_ = NewTestHooksService(*core_);
    auto server = GrpcServer::Start("127.0.0.1:0", {service_.get(), hooks_.get()});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    stub_ = proto::ShardWorker::NewStub(MakeChannel(server_->address()));
  }

  void TearDown() override {
    backend_.hang.store(false);
    server_->Shutdown(std::chrono::milliseconds(0));
    server_.reset();
    core_.reset();
  }

  static std::unique_ptr<grpc::ClientContext> Context() {
    auto context = std::make_unique<grpc::ClientContext>();
    context->set_deadline(std::chrono::system_clock::now() + kPatience);
    return context;
  }

  proto::StatusReply Status() {
    proto::StatusReply reply;
    const auto context = Context();
    EXPECT_TRUE(stub_->Status(context.get(), {}, &reply).ok());
    return reply;
  }

  static proto::ConfigureRequest Request(uint64_t epoch, const std::string& model_dir = "/model") {
    proto::ConfigureRequest request;
    request.set_epoch(epoch);
    request.set_rank(0);
    request.set_world(1);
    request.set_model_dir(model_dir);
    request.set_heartbeat_interval_ms(20);
    return request;
  }

  absl::StatusOr<proto::ConfigureReady> Configure(const proto::ConfigureRequest& request) {
    const auto context = Context();
    const auto reader = stub_->Configure(context.get(), request);
    proto::ConfigureEvent event;
    absl::StatusOr<proto::ConfigureReady> ready = absl::NotFoundError("no final event");
    num_progress_ = 0;
    while (reader->Read(&event)) {
      if (event.has_progress()) ++num_progress_;
      if (event.has_ready()) ready = event.ready();
    }
    const grpc::Status status = reader->Finish();
    if (!status.ok()) return FromGrpcStatus(status);
    return ready;
  }

  absl::Status Reset(bool drop_weights) {
    proto::ResetRequest request;
    request.set_reason("test");
    request.set_drop_weights(drop_weights);
    proto::ResetReply reply;
    const auto context = Context();
    return FromGrpcStatus(stub_->Reset(context.get(), request, &reply));
  }

  FakeBackend backend_;
  SteadyClock clock_;
  std::unique_ptr<WorkerCore> core_;
  std::unique_ptr<grpc::Service> service_;
  std::unique_ptr<grpc::Service> hooks_;
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<proto::ShardWorker::Stub> stub_;
  std::atomic<int> exit_code_{-1};
  std::string exit_reason_;
  int num_progress_ = 0;
};

// The gateway's end of a Steps stream, with a thread for heartbeats that can be stopped.
class StepsClient {
 public:
  StepsClient(proto::ShardWorker::Stub& stub, uint64_t epoch) {
    context_.set_deadline(std::chrono::system_clock::now() + kPatience);
    stream_ = stub.Steps(&context_);
    proto::GatewayMessage open;
    open.mutable_open()->set_epoch(epoch);
    Write(open);
    beating_ = std::thread([this] {
      for (uint64_t i = 1; !stop_.load(); ++i) {
        if (beat_.load()) {
          proto::GatewayMessage message;
          message.mutable_heartbeat()->set_sequence(i);
          Write(message);
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
      }
    });
  }

  ~StepsClient() {
    stop_.store(true);
    beating_.join();
    context_.TryCancel();
    proto::WorkerMessage message;
    while (stream_->Read(&message)) {
    }
    if (!finished_) stream_->Finish();
  }

  bool Write(const proto::GatewayMessage& message) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stream_->Write(message);
  }

  void Send(const proto::Op& op) {
    proto::GatewayMessage message;
    message.set_op(op.SerializeAsString());
    Write(message);
  }

  // The next message that is not a heartbeat; heartbeats are counted. False at the end of the
  // stream.
  bool Next(proto::WorkerMessage* message) {
    while (stream_->Read(message)) {
      if (!message->has_heartbeat()) return true;
      ++heartbeats;
      last_heartbeat = message->heartbeat();
    }
    return false;
  }

  bool NextHeartbeat() {
    proto::WorkerMessage message;
    while (stream_->Read(&message)) {
      if (!message.has_heartbeat()) continue;
      ++heartbeats;
      last_heartbeat = message.heartbeat();
      return true;
    }
    return false;
  }

  proto::OpResult NextResult() {
    proto::WorkerMessage message;
    EXPECT_TRUE(Next(&message)) << "the stream ended instead of a result";
    EXPECT_TRUE(message.has_result());
    return message.result();
  }

  // Reads to the end.
  absl::Status End() {
    proto::WorkerMessage message;
    while (stream_->Read(&message)) {
    }
    finished_ = true;
    stop_.store(true);
    return FromGrpcStatus(stream_->Finish());
  }

  void CloseWrites() {
    beat_.store(false);
    const std::lock_guard<std::mutex> lock(mutex_);
    stream_->WritesDone();
  }

  void Cancel() { context_.TryCancel(); }
  void StopBeating() { beat_.store(false); }

  int heartbeats = 0;
  proto::WorkerHeartbeat last_heartbeat;

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<proto::GatewayMessage, proto::WorkerMessage>> stream_;
  std::mutex mutex_;  // one write at a time
  std::atomic<bool> stop_{false};
  std::atomic<bool> beat_{true};
  bool finished_ = false;
  std::thread beating_;
};

inline proto::Op NewOp(uint64_t op_id) {
  proto::Op op;
  op.set_op_id(op_id);
  op.set_deadline_ms(2000);
  return op;
}

// Opens slot 0 with ids 1..5, maps page 0 and prefills.
inline proto::Op FirstOp(uint64_t op_id) {
  proto::Op op = NewOp(op_id);
  proto::OpenSequence* open = op.add_controls()->mutable_open_sequence();
  for (uint32_t id = 1; id <= 5; ++id)
    open->add_prompt_ids(id);
  open->set_total_ids(5);
  open->set_num_prompt_ids(5);
  open->set_draft_allowed(true);
  open->set_request_id_hash(7);
  op.add_controls()->mutable_map_pages()->add_pages()->set_physical_page(9);
  proto::PrefillSequence* prefill = op.mutable_compute()->mutable_short_prefill()->add_sequences();
  prefill->set_end_position(5);
  prefill->set_draft_next(true);
  return op;
}

inline proto::Op RoundOp(uint64_t op_id, uint32_t k) {
  proto::Op op = NewOp(op_id);
  proto::RoundSequence* round = op.mutable_compute()->mutable_round()->add_sequences();
  round->set_after_previous(true);
  round->set_k(k);
  round->set_draft_next(true);
  return op;
}

}  // namespace twinspark
