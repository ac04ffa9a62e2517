// The calls beside Steps: the states of the protocol, what is refused where, how a worker drains.
#include "shard_worker/service/shard_worker_service.h"

#include <chrono>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/exit_codes.h"
#include "shard_worker/service/worker_fixture.h"

namespace twinspark {
namespace {

using ::testing::HasSubstr;

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
    StepsClient stream(*stub_, 1);
    EXPECT_EQ(stream.End().code(), absl::StatusCode::kFailedPrecondition);
  }
  ASSERT_TRUE(Configure(Request(2)).ok());
  {
    StepsClient stream(*stub_, 1);
    const absl::Status end = stream.End();
    EXPECT_EQ(end.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(std::string(end.message()), HasSubstr("epoch 1"));
    EXPECT_THAT(std::string(end.message()), HasSubstr("epoch 2"));
  }
  EXPECT_EQ(Status().state(), proto::WORKER_READY);
}

TEST_F(ShardWorkerServiceTest, ConfigureIsRefusedWhileServing) {
  ASSERT_TRUE(Configure(Request(1)).ok());
  StepsClient stream(*stub_, 1);
  proto::WorkerMessage message;
  ASSERT_TRUE(stream.Next(&message));
  ASSERT_TRUE(message.has_accepted());
  EXPECT_EQ(message.accepted().epoch(), 1u);
  EXPECT_EQ(Status().state(), proto::WORKER_SERVING);
  const auto second = Configure(Request(2));
  EXPECT_EQ(second.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(second.status().message()), HasSubstr("SERVING"));
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
  StepsClient stream(*stub_, 1);
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
  StepsClient stream(*stub_, 1);
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
  StepsClient stream(*stub_, 100);
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

}  // namespace
}  // namespace twinspark
