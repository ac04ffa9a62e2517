// A Steps stream: ops in order and refused, heartbeats while the compute thread is stuck, the ends
// of an epoch and what they leave behind.
#include "shard_worker/service/steps_reactor.h"

#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/exit_codes.h"
#include "shard_worker/service/worker_fixture.h"

namespace twinspark {
namespace {

using ::testing::HasSubstr;

using StepsReactorTest = ShardWorkerServiceTest;

TEST_F(StepsReactorTest, DecodesWithRunAheadInOrder) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  StepsClient stream(*stub_, 1);
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

TEST_F(StepsReactorTest, LongPromptComesInParts) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  StepsClient stream(*stub_, 1);
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

TEST_F(StepsReactorTest, UnbuiltOpIsRefusedByNameWithoutEffectAndTheEpochLives) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  StepsClient stream(*stub_, 1);
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
TEST_F(StepsReactorTest, BadOpsEndTheEpoch) {
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
    StepsClient stream(*stub_, epoch);
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

TEST_F(StepsReactorTest, BytesThatAreNoOpEndTheEpoch) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  StepsClient stream(*stub_, 1);
  proto::GatewayMessage message;
  message.set_op("\xff\xff\xff");
  stream.Write(message);
  EXPECT_EQ(stream.End().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(StepsReactorTest, MoreThanTwoOpsInFlightEndTheEpoch) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  backend_.step_ms.store(200);
  StepsClient stream(*stub_, 1);
  stream.Send(FirstOp(1));
  stream.Send(RoundOp(2, 0));
  stream.Send(RoundOp(3, 0));
  const absl::Status end = stream.End();
  EXPECT_EQ(end.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(end.message()), HasSubstr("in flight"));
}

TEST_F(StepsReactorTest, DigestCoversBytesTokensAndResiduals) {
  std::vector<uint64_t> digests;
  for (uint64_t epoch = 1; epoch <= 4; ++epoch) {
    proto::Op op = FirstOp(1);
    if (epoch == 3) op.set_deadline_ms(2001);
    if (epoch == 4) backend_.faults.fetch_add(1);  // changes the residual digest only
    ASSERT_TRUE(Configure(Request(epoch)).ok());
    StepsClient stream(*stub_, epoch);
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

TEST_F(StepsReactorTest, OtherRanksSendDigestAndStatusOnly) {
  proto::ConfigureRequest request = Request(1);
  request.set_rank(1);
  request.set_world(2);
  ASSERT_TRUE(Configure(request).ok());
  StepsClient stream(*stub_, 1);
  proto::WorkerMessage message;
  ASSERT_TRUE(stream.Next(&message));
  stream.Send(FirstOp(1));
  const proto::OpResult result = stream.NextResult();
  EXPECT_EQ(result.status().code(), 0u);
  EXPECT_NE(result.digest(), 0u);
  EXPECT_EQ(result.short_prefill_size(), 0);
}

TEST_F(StepsReactorTest, HeartbeatsGoOnWhileTheComputeThreadIsStuck) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  backend_.hang.store(true);
  StepsClient stream(*stub_, 1);
  stream.Send(FirstOp(1));
  for (int i = 0; i < 20; ++i)
    ASSERT_TRUE(stream.NextHeartbeat());
  EXPECT_TRUE(stream.last_heartbeat.busy());
  EXPECT_EQ(stream.last_heartbeat.op_id(), 1u);
  EXPECT_EQ(stream.last_heartbeat.state(), proto::WORKER_SERVING);
  EXPECT_GE(stream.last_heartbeat.sequence(), 20u);
}

TEST_F(StepsReactorTest, OpPastItsDeadlineEndsTheEpochAndWeightsStay) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  backend_.hang.store(true);
  StepsClient stream(*stub_, 1);
  stream.Send(FirstOp(1));
  const absl::Status end = stream.End();
  EXPECT_EQ(end.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(std::string(end.message()), HasSubstr("op 1"));
  backend_.hang.store(false);
  EXPECT_TRUE(Configure(Request(2))->warm());
}

TEST_F(StepsReactorTest, SilentGatewayEndsTheEpoch) {
  proto::ConfigureRequest request = Request(1);
  request.set_gateway_silence_ms(300);
  ASSERT_TRUE(Configure(request).ok());
  StepsClient stream(*stub_, 1);
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

TEST_F(StepsReactorTest, LostStreamInTheMiddleOfAnOpAbortsIt) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  backend_.hang.store(true);
  StepsClient stream(*stub_, 1);
  stream.Send(FirstOp(1));
  ASSERT_TRUE(stream.NextHeartbeat());
  stream.Cancel();
  EXPECT_TRUE(Eventually([&] { return Status().state() == proto::WORKER_IDLE; }))
      << "the hanging op was aborted";
  EXPECT_EQ(backend_.leaves.load(), 1);
}

TEST_F(StepsReactorTest, LostPeerEndsTheEpochAndDeviceErrorEndsTheProcess) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  {
    backend_.FailNextStep(absl::UnavailableError("rank 1 closed the connection"));
    StepsClient stream(*stub_, 1);
    stream.Send(FirstOp(1));
    EXPECT_EQ(stream.End().code(), absl::StatusCode::kUnavailable);
    EXPECT_EQ(Status().state(), proto::WORKER_IDLE);
    EXPECT_EQ(exit_code_.load(), -1);
  }
  ASSERT_TRUE(Configure(Request(2)).ok());
  backend_.FailNextStep(absl::InternalError("device error 700"));
  StepsClient stream(*stub_, 2);
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
TEST_F(StepsReactorTest, LostRowServiceEndsAnIdleEpoch) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  {
    StepsClient stream(*stub_, 1);
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

TEST_F(StepsReactorTest, ArmedFaultStrikesTheNextOpOnly) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  StepsClient stream(*stub_, 1);
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
