// A worker with a backend of a few lines behind a real gRPC server on a free port: the states of
// the protocol, what is refused where, heartbeats while the compute thread is stuck, the ends of an
// epoch and what they leave behind. Every wait has a bound far above what it takes.
#include "shard_worker/service/shard_worker_service.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/client_context.h>

#include "absl/strings/str_cat.h"
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/limits.h"
#include "common/rpc/grpc_channel.h"
#include "common/rpc/grpc_server.h"
#include "common/rpc/grpc_status.h"
#include "proto/shard_worker.grpc.pb.h"
#include "shard_worker/testing/fake_backend.h"

namespace twinspark {
namespace {

using ::testing::HasSubstr;

constexpr auto kPatience = std::chrono::seconds(30);

bool Eventually(const std::function<bool()>& condition) {
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
class Stream {
 public:
  Stream(proto::ShardWorker::Stub& stub, uint64_t epoch) {
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

  ~Stream() {
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

proto::Op NewOp(uint64_t op_id) {
  proto::Op op;
  op.set_op_id(op_id);
  op.set_deadline_ms(2000);
  return op;
}

// Opens slot 0 with ids 1..5, maps page 0 and prefills.
proto::Op FirstOp(uint64_t op_id) {
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

proto::Op RoundOp(uint64_t op_id, uint32_t k) {
  proto::Op op = NewOp(op_id);
  proto::RoundSequence* round = op.mutable_compute()->mutable_round()->add_sequences();
  round->set_after_previous(true);
  round->set_k(k);
  round->set_draft_next(true);
  return op;
}

TEST_F(ShardWorkerServiceTest, HelloTellsWhoItIs) {
  proto::HelloReply reply;
  const auto context = Context();
  ASSERT_TRUE(stub_->Hello(context.get(), {}, &reply).ok());
  EXPECT_EQ(reply.backend(), "fake");
  EXPECT_EQ(reply.state(), proto::WORKER_IDLE);
  EXPECT_EQ(reply.simd_targets_size(), 2);
  EXPECT_EQ(reply.process().pid(), static_cast<uint32_t>(getpid()));
  EXPECT_FALSE(reply.process().build().empty());
  EXPECT_EQ(reply.weights_digest(), "");
}

TEST_F(ShardWorkerServiceTest, ConfigureReportsProgressThenEverything) {
  const auto ready = Configure(Request(1));
  ASSERT_TRUE(ready.ok()) << ready.status();
  EXPECT_GE(num_progress_, 3);  // two of the load, one of the join
  EXPECT_FALSE(ready->warm());
  EXPECT_EQ(ready->granted().num_slots(), 8u);
  EXPECT_EQ(ready->model().vocab_size(), static_cast<uint32_t>(FakeBackend::kVocab));
  EXPECT_EQ(ready->memory_plan_size(), 1);
  EXPECT_EQ(ready->cost_table_size(), 1);
  EXPECT_EQ(Status().state(), proto::WORKER_READY);
  EXPECT_EQ(Status().epoch(), 1u);
}

TEST_F(ShardWorkerServiceTest, SecondConfigureWithTheSameDigestsIsWarm) {
  const auto first = Configure(Request(1));
  ASSERT_TRUE(first.ok());
  ASSERT_TRUE(Reset(false).ok());
  proto::ConfigureRequest request = Request(2);
  request.set_expected_config_digest(first->config_digest());
  request.set_expected_weights_digest(first->weights_digest());
  const auto second = Configure(request);
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_TRUE(second->warm());
  EXPECT_EQ(backend_.loads.load(), 1);
  EXPECT_EQ(backend_.joins.load(), 2);
  ASSERT_TRUE(Reset(false).ok());
  proto::ConfigureRequest distrusting = Request(3);
  distrusting.set_reload_weights(true);
  ASSERT_TRUE(Configure(distrusting).ok());
  EXPECT_EQ(backend_.loads.load(), 2) << "the gateway does not trust them any more";
  ASSERT_TRUE(Reset(true).ok());
  ASSERT_TRUE(Configure(Request(4)).ok());
  EXPECT_EQ(backend_.loads.load(), 3) << "weights were given back, so they are loaded again";
}

TEST_F(ShardWorkerServiceTest, OldEpochsAreRefusedWithBothValues) {
  ASSERT_TRUE(Configure(Request(7)).ok());
  ASSERT_TRUE(Reset(false).ok());
  for (const uint64_t epoch : {uint64_t{7}, uint64_t{6}}) {
    const auto again = Configure(Request(epoch));
    EXPECT_EQ(again.status().code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(again.status().message()), HasSubstr(absl::StrCat(epoch)));
    EXPECT_THAT(std::string(again.status().message()), HasSubstr("7"));
  }
  proto::PrepareGroupRequest prepare;
  prepare.set_epoch(7);
  prepare.set_world(1);
  proto::PrepareGroupReply reply;
  auto context = Context();
  EXPECT_EQ(stub_->PrepareGroup(context.get(), prepare, &reply).error_code(),
            grpc::StatusCode::FAILED_PRECONDITION);
  prepare.set_epoch(8);
  context = Context();
  EXPECT_TRUE(stub_->PrepareGroup(context.get(), prepare, &reply).ok());
  EXPECT_EQ(reply.endpoint(), "fake:8:0");
  EXPECT_TRUE(Configure(Request(8)).ok()) << "prepared and configured are the same epoch";
}

TEST_F(ShardWorkerServiceTest, ForeignDigestsAreRefusedAndTheWorkerStaysIdle) {
  proto::ConfigureRequest request = Request(1);
  request.set_expected_weights_digest("0123456789abcdef");
  const auto refused = Configure(request);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("0123456789abcdef"));
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr(Status().weights_digest()));
  EXPECT_EQ(Status().state(), proto::WORKER_IDLE);
  ASSERT_EQ(Status().errors_size(), 1);
}

TEST_F(ShardWorkerServiceTest, BadFilesAndTooLittleMemoryEndTheProcessWithTheirCodes) {
  const std::vector<std::pair<absl::Status, int>> cases = {
      {absl::NotFoundError("/model/config.json is not there"), kExitBadData},
      {absl::DataLossError("shard 1 is short"), kExitBadData},
      {absl::ResourceExhaustedError("need 5 GiB, have 2 GiB, set KV_PAGES"), kExitNoMemory},
      {absl::InternalError("device lost"), kExitDevice},
  };
  for (const auto& [status, exit_code] : cases)
    EXPECT_EQ(FatalExitCode(status), exit_code);
  backend_.FailNextLoad(cases[2].first);
  const auto refused = Configure(Request(1));
  EXPECT_EQ(refused.status(), cases[2].first);
  EXPECT_EQ(Status().state(), proto::WORKER_FAILED);
  EXPECT_THAT(Status().errors(0), HasSubstr("need 5 GiB"));
  EXPECT_EQ(exit_code_.load(), -1) << "the reason stays visible for a moment";
  EXPECT_TRUE(Eventually([&] {
    core_->Tick();
    return exit_code_.load() == kExitNoMemory;
  }));
  EXPECT_THAT(exit_reason_, HasSubstr("need 5 GiB"));
}

TEST_F(ShardWorkerServiceTest, BadFilesEndAFirstLoadButNotAWorkerWithWeights) {
  const absl::Status damage = absl::DataLossError("shard 1 is short");
  ASSERT_TRUE(Configure(Request(1)).ok());
  ASSERT_TRUE(Reset(false).ok());
  backend_.FailNextLoad(damage);
  EXPECT_EQ(Configure(Request(2)).status(), damage);
  EXPECT_EQ(Status().state(), proto::WORKER_IDLE);
  EXPECT_THAT(Status().errors(0), HasSubstr("shard 1 is short"));
  const auto whole_again = Configure(Request(3));
  ASSERT_TRUE(whole_again.ok()) << whole_again.status();
  EXPECT_TRUE(whole_again->warm()) << "the weights were kept";
  ASSERT_TRUE(Reset(true).ok());
  backend_.FailNextLoad(damage);
  EXPECT_EQ(Configure(Request(4)).status(), damage);
  EXPECT_EQ(Status().state(), proto::WORKER_FAILED) << "nothing in memory to go on with";
}

TEST_F(ShardWorkerServiceTest, PeerThatNeverComesIsNotFatal) {
  backend_.FailNextJoin(absl::DeadlineExceededError("rank 1 did not come"));
  EXPECT_EQ(Configure(Request(1)).status().code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(Status().state(), proto::WORKER_IDLE);
  EXPECT_TRUE(Configure(Request(2))->warm());
}

TEST_F(ShardWorkerServiceTest, StepsAreRefusedUnlessReadyAndOfThisEpoch) {
  {
    Stream stream(*stub_, 1);
    EXPECT_EQ(stream.End().code(), absl::StatusCode::kFailedPrecondition);
  }
  ASSERT_TRUE(Configure(Request(2)).ok());
  {
    Stream stream(*stub_, 1);
    const absl::Status end = stream.End();
    EXPECT_EQ(end.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(end.message()), HasSubstr("epoch 1"));
    EXPECT_THAT(std::string(end.message()), HasSubstr("epoch 2"));
  }
  EXPECT_EQ(Status().state(), proto::WORKER_READY);
}

TEST_F(ShardWorkerServiceTest, ConfigureIsRefusedWhileServing) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  Stream stream(*stub_, 1);
  proto::WorkerMessage message;
  ASSERT_TRUE(stream.Next(&message));
  ASSERT_TRUE(message.has_accepted());
  EXPECT_EQ(message.accepted().epoch(), 1u);
  EXPECT_EQ(Status().state(), proto::WORKER_SERVING);
  const auto second = Configure(Request(2));
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("SERVING"));
}

TEST_F(ShardWorkerServiceTest, DecodesWithRunAheadInOrder) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  Stream stream(*stub_, 1);
  proto::WorkerMessage message;
  ASSERT_TRUE(stream.Next(&message));
  std::vector<int32_t> ids = {1, 2, 3, 4, 5};
  stream.Send(FirstOp(1));
  stream.Send(RoundOp(2, 3));
  for (uint64_t op_id = 1; op_id <= 20; ++op_id) {
    const proto::OpResult result = stream.NextResult();
    ASSERT_EQ(result.op_id(), op_id);
    ASSERT_EQ(result.status().code(), 0u) << result.status().message();
    const proto::SequenceResult& sequence = op_id == 1 ? result.short_prefill(0) : result.round(0);
    ASSERT_GE(sequence.tokens_size(), 1);
    for (const uint32_t token : sequence.tokens()) {
      ASSERT_EQ(static_cast<int32_t>(token), FakeBackend::NextToken(ids));
      ids.push_back(static_cast<int32_t>(token));
    }
    EXPECT_EQ(sequence.committed_length(), ids.size() - 1);
    EXPECT_EQ(sequence.draft_ids_size(), FakeBackend::kMaxDrafts);
    EXPECT_NE(result.digest(), 0u);
    if (op_id <= 18) stream.Send(RoundOp(op_id + 2, 3));
  }
  EXPECT_EQ(Status().last_op_id(), 20u);
  EXPECT_EQ(Status().slots_in_use(), 1u);
  EXPECT_EQ(Status().pages_in_use(), 1u);
  EXPECT_GT(Status().op_timings_size(), 0);
  EXPECT_GT(Status().resident_bytes(), 0u);
  proto::Op close = NewOp(21);
  close.add_controls()->mutable_close_sequence()->set_slot(0);
  close.add_controls()->mutable_fence();
  stream.Send(close);
  EXPECT_EQ(stream.NextResult().status().code(), 0u);
  EXPECT_EQ(Status().slots_in_use(), 0u);
  EXPECT_EQ(Status().pages_in_use(), 0u);
  stream.CloseWrites();
  EXPECT_TRUE(stream.End().ok());
  EXPECT_TRUE(Eventually([&] { return Status().state() == proto::WORKER_IDLE; }));
  EXPECT_EQ(Status().errors_size(), 0) << "a stream that the gateway closes is no error";
}

TEST_F(ShardWorkerServiceTest, LongPromptComesInParts) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  Stream stream(*stub_, 1);
  proto::WorkerMessage message;
  ASSERT_TRUE(stream.Next(&message));
  proto::Op op = FirstOp(1);
  op.mutable_controls(0)->mutable_open_sequence()->set_total_ids(7);
  proto::Control part;
  part.mutable_open_sequence()->set_ids_offset(5);
  part.mutable_open_sequence()->add_prompt_ids(6);
  part.mutable_open_sequence()->add_prompt_ids(7);
  proto::Op first = NewOp(1);
  *first.add_controls() = op.controls(0);
  stream.Send(first);
  EXPECT_EQ(stream.NextResult().status().code(), 0u);
  proto::Op second = NewOp(2);
  *second.add_controls() = part;
  *second.add_controls() = op.controls(1);
  *second.mutable_compute() = op.compute();
  second.mutable_compute()->mutable_short_prefill()->mutable_sequences(0)->set_end_position(7);
  stream.Send(second);
  const proto::OpResult result = stream.NextResult();
  ASSERT_EQ(result.status().code(), 0u) << result.status().message();
  EXPECT_EQ(static_cast<int32_t>(result.short_prefill(0).tokens(0)),
            FakeBackend::NextToken({1, 2, 3, 4, 5, 6, 7}));
}

TEST_F(ShardWorkerServiceTest, UnbuiltOpIsRefusedByNameWithoutEffectAndTheEpochLives) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  Stream stream(*stub_, 1);
  proto::WorkerMessage message;
  ASSERT_TRUE(stream.Next(&message));
  proto::Op op = FirstOp(1);
  op.add_controls()->mutable_snapshot()->set_snapshot_id(1);
  stream.Send(op);
  proto::OpResult result = stream.NextResult();
  EXPECT_EQ(result.status().code(), static_cast<uint32_t>(absl::StatusCode::kUnimplemented));
  EXPECT_THAT(result.status().message(), HasSubstr("Snapshot"));
  EXPECT_EQ(Status().slots_in_use(), 0u) << "no effect";
  proto::Op slice = FirstOp(2);
  slice.mutable_compute()->clear_short_prefill();
  proto::ChunkSlice* chunk = slice.mutable_compute()->mutable_chunk_slice();
  chunk->set_end_position(5);
  chunk->set_end_layer(FakeBackend::kLayers / 2);
  stream.Send(slice);
  result = stream.NextResult();
  EXPECT_EQ(result.status().code(), static_cast<uint32_t>(absl::StatusCode::kUnimplemented));
  EXPECT_EQ(Status().slots_in_use(), 0u) << "no effect";
  chunk->set_end_layer(FakeBackend::kLayers);
  slice.set_op_id(3);
  stream.Send(slice);
  result = stream.NextResult();
  EXPECT_EQ(result.status().code(), 0u) << result.status().message();
  EXPECT_EQ(result.chunk_slice().tokens_size(), 1);
}

// Each of these ops ends the epoch with INVALID_ARGUMENT, in the result and as the end of the
// stream.
TEST_F(ShardWorkerServiceTest, BadOpsEndTheEpoch) {
  std::vector<std::pair<std::string, proto::Op>> cases;
  cases.emplace_back("op_id", FirstOp(5));
  cases.emplace_back("slot 0 is not open", RoundOp(1, 0));
  cases.emplace_back("does not exist", FirstOp(1));
  cases.back().second.mutable_controls(0)->mutable_open_sequence()->set_slot(8);
  cases.emplace_back("begins at position", FirstOp(1));
  cases.back()
      .second.mutable_compute()
      ->mutable_short_prefill()
      ->mutable_sequences(0)
      ->set_first_position(1);
  cases.emplace_back("page 0 is not mapped", FirstOp(1));
  cases.back().second.mutable_controls()->DeleteSubrange(1, 1);
  cases.emplace_back("Round.k", RoundOp(1, 6));
  cases.emplace_back("deadline_ms", FirstOp(1));
  cases.back().second.set_deadline_ms(0);
  cases.emplace_back("physical_page", FirstOp(1));
  cases.back().second.mutable_controls(1)->mutable_map_pages()->mutable_pages(0)->set_physical_page(
      64);
  cases.emplace_back("twice", FirstOp(1));
  *cases.back().second.mutable_compute()->mutable_round()->add_sequences() =
      RoundOp(1, 0).compute().round().sequences(0);
  uint64_t epoch = 0;
  for (const auto& [text, op] : cases) {
    ASSERT_TRUE(Configure(Request(++epoch)).ok());
    Stream stream(*stub_, epoch);
    proto::WorkerMessage message;
    ASSERT_TRUE(stream.Next(&message));
    stream.Send(op);
    const proto::OpResult result = stream.NextResult();
    EXPECT_EQ(result.status().code(), static_cast<uint32_t>(absl::StatusCode::kInvalidArgument))
        << text;
    EXPECT_THAT(result.status().message(), HasSubstr(text));
    const absl::Status end = stream.End();
    EXPECT_EQ(end.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(end.message()), HasSubstr(text));
    ASSERT_TRUE(Eventually([&] { return Status().state() == proto::WORKER_IDLE; }));
    EXPECT_EQ(Status().slots_in_use(), 0u);
  }
}

TEST_F(ShardWorkerServiceTest, BytesThatAreNoOpEndTheEpoch) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  Stream stream(*stub_, 1);
  proto::GatewayMessage message;
  message.set_op("\xff\xff\xff");
  stream.Write(message);
  EXPECT_EQ(stream.End().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(ShardWorkerServiceTest, MoreThanTwoOpsInFlightEndTheEpoch) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  backend_.step_ms.store(200);
  Stream stream(*stub_, 1);
  stream.Send(FirstOp(1));
  stream.Send(RoundOp(2, 0));
  stream.Send(RoundOp(3, 0));
  const absl::Status end = stream.End();
  EXPECT_EQ(end.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(end.message()), HasSubstr("in flight"));
}

TEST_F(ShardWorkerServiceTest, DigestCoversBytesTokensAndResiduals) {
  std::vector<uint64_t> digests;
  for (uint64_t epoch = 1; epoch <= 4; ++epoch) {
    proto::Op op = FirstOp(1);
    if (epoch == 3) op.set_deadline_ms(2001);
    if (epoch == 4) backend_.faults.fetch_add(1);  // changes the residual digest only
    ASSERT_TRUE(Configure(Request(epoch)).ok());
    Stream stream(*stub_, epoch);
    proto::WorkerMessage message;
    ASSERT_TRUE(stream.Next(&message));
    stream.Send(op);
    digests.push_back(stream.NextResult().digest());
    stream.CloseWrites();
    ASSERT_TRUE(stream.End().ok());
  }
  EXPECT_EQ(digests[0], digests[1]);
  EXPECT_NE(digests[0], digests[2]) << "op bytes";
  EXPECT_NE(digests[0], digests[3]) << "residual streams";
}

TEST_F(ShardWorkerServiceTest, OtherRanksSendDigestAndStatusOnly) {
  proto::ConfigureRequest request = Request(1);
  request.set_rank(1);
  request.set_world(2);
  ASSERT_TRUE(Configure(request).ok());
  Stream stream(*stub_, 1);
  proto::WorkerMessage message;
  ASSERT_TRUE(stream.Next(&message));
  stream.Send(FirstOp(1));
  const proto::OpResult result = stream.NextResult();
  EXPECT_EQ(result.status().code(), 0u);
  EXPECT_NE(result.digest(), 0u);
  EXPECT_EQ(result.short_prefill_size(), 0);
}

TEST_F(ShardWorkerServiceTest, HeartbeatsGoOnWhileTheComputeThreadIsStuck) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  backend_.hang.store(true);
  Stream stream(*stub_, 1);
  stream.Send(FirstOp(1));
  for (int i = 0; i < 20; ++i)
    ASSERT_TRUE(stream.NextHeartbeat());
  EXPECT_TRUE(stream.last_heartbeat.busy());
  EXPECT_EQ(stream.last_heartbeat.op_id(), 1u);
  EXPECT_EQ(stream.last_heartbeat.state(), proto::WORKER_SERVING);
  EXPECT_GE(stream.last_heartbeat.sequence(), 20u);
}

TEST_F(ShardWorkerServiceTest, OpPastItsDeadlineEndsTheEpochAndWeightsStay) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  backend_.hang.store(true);
  Stream stream(*stub_, 1);
  stream.Send(FirstOp(1));
  const absl::Status end = stream.End();
  EXPECT_EQ(end.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(end.message()), HasSubstr("op 1"));
  backend_.hang.store(false);
  EXPECT_TRUE(Configure(Request(2))->warm());
}

TEST_F(ShardWorkerServiceTest, SilentGatewayEndsTheEpoch) {
  proto::ConfigureRequest request = Request(1);
  request.set_gateway_silence_ms(300);
  ASSERT_TRUE(Configure(request).ok());
  Stream stream(*stub_, 1);
  proto::WorkerMessage message;
  ASSERT_TRUE(stream.Next(&message));
  stream.StopBeating();
  const absl::Status end = stream.End();
  EXPECT_EQ(end.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(end.message()), HasSubstr("silent"));
  ASSERT_TRUE(Eventually([&] { return Status().state() == proto::WORKER_IDLE; }));
  ASSERT_EQ(Status().errors_size(), 1);
  EXPECT_THAT(Status().errors(0), HasSubstr("silent"));
  EXPECT_NE(Status().weights_digest(), "");
}

TEST_F(ShardWorkerServiceTest, LostStreamInTheMiddleOfAnOpAbortsIt) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  backend_.hang.store(true);
  Stream stream(*stub_, 1);
  stream.Send(FirstOp(1));
  ASSERT_TRUE(stream.NextHeartbeat());
  stream.Cancel();
  EXPECT_TRUE(Eventually([&] { return Status().state() == proto::WORKER_IDLE; }))
      << "the hanging op was aborted";
  EXPECT_EQ(backend_.leaves.load(), 1);
}

TEST_F(ShardWorkerServiceTest, LostPeerEndsTheEpochAndDeviceErrorEndsTheProcess) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  {
    backend_.FailNextStep(absl::UnavailableError("rank 1 closed the connection"));
    Stream stream(*stub_, 1);
    stream.Send(FirstOp(1));
    EXPECT_EQ(stream.End().code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(Status().state(), proto::WORKER_IDLE);
    EXPECT_EQ(exit_code_.load(), -1);
  }
  ASSERT_TRUE(Configure(Request(2)).ok());
  backend_.FailNextStep(absl::InternalError("device error 700"));
  Stream stream(*stub_, 2);
  stream.Send(FirstOp(1));
  EXPECT_EQ(stream.End().code(), absl::StatusCode::kInternal);
  EXPECT_EQ(Status().state(), proto::WORKER_FAILED);
  EXPECT_TRUE(Eventually([&] {
    core_->Tick();
    return exit_code_.load() == kExitDevice;
  }));
}

// No op is running and none comes: the tick alone ends the epoch, in READY as in SERVING, and the
// next Configure goes on with the same weights.
TEST_F(ShardWorkerServiceTest, LostRowServiceEndsAnIdleEpoch) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  {
    Stream stream(*stub_, 1);
    ASSERT_TRUE(stream.NextHeartbeat());
    core_->Tick();
    EXPECT_EQ(Status().state(), proto::WORKER_SERVING);
    backend_.row_service_lost.store(true);
    core_->Tick();
    const absl::Status ended = stream.End();
    EXPECT_EQ(ended.code(), absl::StatusCode::kUnavailable);
    EXPECT_THAT(std::string(ended.message()), HasSubstr("row service: no heartbeat"));
  }
  ASSERT_TRUE(Eventually([&] { return Status().state() == proto::WORKER_IDLE; }));
  core_->Tick();  // an IDLE worker has no row service to lose
  EXPECT_EQ(Status().state(), proto::WORKER_IDLE);
  backend_.row_service_lost.store(false);
  ASSERT_TRUE(Configure(Request(2))->warm());
  backend_.row_service_lost.store(true);
  core_->Tick();
  EXPECT_EQ(Status().state(), proto::WORKER_IDLE);
  EXPECT_THAT(Status().errors(1), HasSubstr("epoch 2: row service: no heartbeat"));
  EXPECT_EQ(backend_.leaves.load(), 2);
  EXPECT_EQ(exit_code_.load(), -1);
}

TEST_F(ShardWorkerServiceTest, ReadyWithoutAStreamFallsBackToIdle) {
  TearDown();
  WorkerCore::Options options;
  options.ready_wait_ms = 50;
  StartWorker(options);
  ASSERT_TRUE(Configure(Request(100)).ok());
  EXPECT_TRUE(Eventually([&] {
    core_->Tick();
    return Status().state() == proto::WORKER_IDLE;
  }));
}

TEST_F(ShardWorkerServiceTest, DrainWhenIdleExitsAtOnce) {
  proto::DrainReply reply;
  const auto context = Context();
  EXPECT_TRUE(stub_->Drain(context.get(), {}, &reply).ok());
  EXPECT_EQ(exit_code_.load(), kExitOk);
}

TEST_F(ShardWorkerServiceTest, DrainingWorkerGoesOnUntilTheGatewayCloses) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  Stream stream(*stub_, 1);
  proto::WorkerMessage message;
  ASSERT_TRUE(stream.Next(&message));
  core_->Drain("test");
  stream.Send(FirstOp(1));
  EXPECT_EQ(stream.NextResult().status().code(), 0u);
  ASSERT_TRUE(stream.NextHeartbeat());
  EXPECT_EQ(stream.last_heartbeat.state(), proto::WORKER_DRAINING);
  EXPECT_EQ(Status().state(), proto::WORKER_DRAINING);
  core_->Tick();
  EXPECT_EQ(exit_code_.load(), -1);
  stream.CloseWrites();
  EXPECT_TRUE(stream.End().ok());
  EXPECT_TRUE(Eventually([&] { return exit_code_.load() == kExitOk; }));
}

// DRAIN_SECONDS is for sequences that are open; without one the worker goes and says why.
TEST_F(ShardWorkerServiceTest, DrainingWorkerWithoutASequenceEndsTheEpochAtOnce) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  Stream stream(*stub_, 1);
  proto::WorkerMessage message;
  ASSERT_TRUE(stream.Next(&message));
  stream.Send(FirstOp(1));
  EXPECT_EQ(stream.NextResult().status().code(), 0u);
  core_->Drain("signal 15");
  const auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
  while (std::chrono::steady_clock::now() < until)
    core_->Tick();
  EXPECT_EQ(exit_code_.load(), -1);  // sequence 0 is open
  proto::Op close = NewOp(2);
  close.add_controls()->mutable_close_sequence()->set_slot(0);
  stream.Send(close);
  EXPECT_EQ(stream.NextResult().status().code(), 0u);
  EXPECT_TRUE(Eventually([&] {
    core_->Tick();
    return exit_code_.load() == kExitOk;
  }));
  const absl::Status end = stream.End();
  EXPECT_EQ(end.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(end.message(), HasSubstr("the worker stops (signal 15): no sequence is open"));
}

TEST_F(ShardWorkerServiceTest, DrainHasALimit) {
  TearDown();
  WorkerCore::Options options;
  options.drain_seconds = 0.05;
  StartWorker(options);
  ASSERT_TRUE(Configure(Request(100)).ok());
  Stream stream(*stub_, 100);
  proto::WorkerMessage message;
  ASSERT_TRUE(stream.Next(&message));
  stream.Send(FirstOp(1));  // a sequence that is never closed
  EXPECT_EQ(stream.NextResult().status().code(), 0u);
  core_->Drain("test");
  EXPECT_TRUE(Eventually([&] {
    core_->Tick();
    return exit_code_.load() == kExitOk;
  }));
  EXPECT_THAT(stream.End().message(), HasSubstr("the drain time is over"));
}

TEST_F(ShardWorkerServiceTest, ArmedFaultStrikesTheNextOpOnly) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  Stream stream(*stub_, 1);
  proto::WorkerMessage message;
  ASSERT_TRUE(stream.Next(&message));
  const auto hooks = proto::ShardWorkerTestHooks::NewStub(MakeChannel(server_->address()));
  proto::FlipBitReply reply;
  const auto context = Context();
  ASSERT_TRUE(hooks->FlipBit(context.get(), {}, &reply).ok());
  EXPECT_EQ(backend_.faults.load(), 0);
  stream.Send(FirstOp(1));
  stream.NextResult();
  stream.Send(RoundOp(2, 0));
  stream.NextResult();
  EXPECT_EQ(backend_.faults.load(), 1);
}

}  // namespace
}  // namespace twinspark
