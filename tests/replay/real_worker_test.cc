// Real workers (gRPC, TCP group, the demo model; Engram rows from memory) driven without a gateway:
// golden tokens through the whole worker at TP 1 and 2 with drafts; equal digests; two epochs with
// weights kept; a fault on one rank shows in the digest of the very next op; a recorded log replays
// bit for bit, and a replay against a damaged recording says so.
#include <cstdlib>
#include <fstream>
#include <memory>
#include <string>
#include <vector>

#include <boost/json.hpp>
#include <grpcpp/client_context.h>

#include "absl/strings/str_cat.h"
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/check.h"
#include "common/clock.h"
#include "common/file_util.h"
#include "common/limits.h"
#include "common/rpc/grpc_channel.h"
#include "common/rpc/grpc_server.h"
#include "common/rpc/grpc_status.h"
#include "common/testing/temp_dir.h"
#include "proto/shard_worker.grpc.pb.h"
#include "shard_worker/backend/model_backend.h"
#include "shard_worker/runtime/op_log.h"
#include "shard_worker/runtime/worker_core.h"
#include "shard_worker/service/shard_worker_service.h"
#include "tests/golden/model/memory_row_source.h"
#include "tests/replay/worker_driver.h"

namespace twinspark {
namespace {

constexpr char kModelDir[] = TWINSPARK_DEMO_MODEL;

std::shared_ptr<const golden::EngramTables> Tables() {
  static const auto tables = golden::EngramTables::Load(kModelDir);
  CHECK(tables.ok()) << tables.status().ToString();
  return *tables;
}

RowConnector RowsFromMemory() {
  return [](const ModelConfig&, const GroupConfig& group, int) -> absl::StatusOr<RowConnection> {
    RowConnection connection;
    connection.source =
        std::make_unique<golden::MemoryRowSource>(Tables(), group.rank, group.world);
    connection.facts = [] { return RowServiceFacts(); };
    return connection;
  };
}

// One worker of this process, as the program has it but for the row service.
struct Worker {
  explicit Worker(const std::string& op_log_dir)
      : op_log(op_log_dir), backend(Options(), RowsFromMemory()) {
    core = std::make_unique<WorkerCore>(
        WorkerCore::Options(), backend, clock, [](int, const std::string&) {},
        [this, record = !op_log_dir.empty()](const GroupConfig& group, const WorkerOp& op,
                                             const OpOutcome& outcome) {
          if (record) op_log.Write(group, op, outcome);
        });
    service = NewShardWorkerService(*core, ProcessFacts::Own());
    hooks = NewTestHooksService(*core);
    auto started = GrpcServer::Start("127.0.0.1:0", {service.get(), hooks.get()});
    CHECK(started.ok()) << started.status().ToString();
    server = *std::move(started);
  }
  ~Worker() {
    server.reset();
    core.reset();
  }

  static ModelBackend::Options Options() {
    ModelBackend::Options options;
    options.num_threads = 1;
    return options;
  }

  SteadyClock clock;
  OpLogWriter op_log;
  ModelBackend backend;
  std::unique_ptr<WorkerCore> core;
  std::unique_ptr<grpc::Service> service;
  std::unique_ptr<grpc::Service> hooks;
  std::unique_ptr<GrpcServer> server;
};

struct Case {
  std::string name;
  std::vector<uint32_t> prompt;
  std::vector<uint32_t> output;
};

std::vector<uint32_t> ReadIds(const boost::json::value& list) {
  std::vector<uint32_t> ids;
  for (const boost::json::value& id : list.as_array())
    ids.push_back(static_cast<uint32_t>(id.to_number<int64_t>()));
  return ids;
}

std::vector<Case> GoldenCases(size_t count) {
  const auto text = ReadFile(absl::StrCat(kModelDir, "/golden.json"), size_t{16} << 20);
  CHECK(text.ok()) << text.status().ToString();
  std::vector<Case> cases;
  const boost::json::value document = boost::json::parse(*text);
  for (const boost::json::value& item : document.at("cases").as_array()) {
    if (cases.size() == count) break;
    cases.push_back({item.at("name").as_string().c_str(), ReadIds(item.at("prompt_ids")),
                     ReadIds(item.at("output_ids"))});
  }
  return cases;
}

class RealWorkerTest : public ::testing::Test {
 protected:
  std::vector<std::unique_ptr<Worker>> StartWorkers(int world, const std::string& op_log_dir = "") {
    std::vector<std::unique_ptr<Worker>> workers;
    for (int rank = 0; rank < world; ++rank)
      workers.push_back(std::make_unique<Worker>(op_log_dir));
    return workers;
  }

  static absl::StatusOr<std::unique_ptr<WorkerDriver>> Open(
      const std::vector<std::unique_ptr<Worker>>& workers) {
    DriverGroup group;
    for (const auto& worker : workers)
      group.workers.push_back(worker->server->address());
    group.model_dir = kModelDir;
    group.limits.set_num_slots(4);
    group.limits.set_num_pages(64);
    return WorkerDriver::Open(group);
  }

  static proto::Op OpenOp(uint32_t slot, const std::vector<uint32_t>& prompt) {
    proto::Op op;
    proto::OpenSequence* open = op.add_controls()->mutable_open_sequence();
    open->set_slot(slot);
    for (const uint32_t id : prompt)
      open->add_prompt_ids(id);
    open->set_total_ids(static_cast<uint32_t>(prompt.size()));
    open->set_num_prompt_ids(static_cast<uint32_t>(prompt.size()));
    open->set_draft_allowed(true);
    open->mutable_sampling()->add_stop_ids(1);
    proto::MapPages* map = op.add_controls()->mutable_map_pages();
    map->set_slot(slot);
    for (uint32_t page = 0; page < 16; ++page) {
      proto::PageMapping* mapping = map->add_pages();
      mapping->set_logical_page(page);
      mapping->set_physical_page(slot * 16 + page);
    }
    proto::PrefillSequence* prefill =
        op.mutable_compute()->mutable_short_prefill()->add_sequences();
    prefill->set_slot(slot);
    prefill->set_end_position(static_cast<uint32_t>(prompt.size()));
    prefill->set_draft_next(true);
    return op;
  }

  static proto::Op RoundOp(uint32_t slot, uint32_t k) {
    proto::Op op;
    proto::RoundSequence* round = op.mutable_compute()->mutable_round()->add_sequences();
    round->set_slot(slot);
    round->set_after_previous(true);
    round->set_k(k);
    round->set_draft_next(true);
    return op;
  }

  // Runs an op on all ranks and checks that they agree.
  static proto::OpResult Run(WorkerDriver& driver, const proto::Op& op) {
    const auto results = driver.RunOp(op);
    EXPECT_TRUE(results.ok()) << results.status();
    if (!results.ok()) return {};
    for (const proto::OpResult& result : *results) {
      EXPECT_EQ(result.status().code(), 0u) << result.status().message();
      EXPECT_EQ(result.digest(), (*results)[0].digest());
    }
    return (*results)[0];
  }

  // The output of a case, greedy, with k drafts.
  static std::vector<uint32_t> Generate(WorkerDriver& driver, const Case& golden, uint32_t k) {
    proto::OpResult result = Run(driver, OpenOp(0, golden.prompt));
    std::vector<uint32_t> output;
    proto::SequenceResult sequence =
        result.short_prefill_size() == 1 ? result.short_prefill(0) : proto::SequenceResult();
    while (true) {
      for (const uint32_t token : sequence.tokens()) {
        output.push_back(token);
        if (token == 1 || output.size() == golden.output.size()) {
          proto::Op close;
          close.add_controls()->mutable_close_sequence()->set_slot(0);
          Run(driver, close);
          return output;
        }
      }
      result = Run(driver, RoundOp(0, k));
      if (result.round_size() != 1 || result.round(0).tokens_size() == 0) return output;
      sequence = result.round(0);
      EXPECT_FALSE(sequence.non_finite());
    }
  }
};

TEST_F(RealWorkerTest, GoldenTokensWithAndWithoutDraftsOnOneAndTwoRanks) {
  const std::vector<Case> cases = GoldenCases(3);
  for (const int world : {1, 2}) {
    const auto workers = StartWorkers(world);
    const auto driver = Open(workers);
    ASSERT_TRUE(driver.ok()) << driver.status();
    EXPECT_GT((*driver)->ready().cost_table_size(), 2);
    EXPECT_EQ((*driver)->ready().granted().num_pages(), 64u);
    for (const Case& golden : cases) {
      for (const uint32_t k : {0u, 3u, 5u}) {
        EXPECT_EQ(Generate(**driver, golden, k), golden.output)
            << golden.name << " k " << k << " world " << world;
      }
    }
    EXPECT_TRUE((*driver)->Close().ok());
  }
}

TEST_F(RealWorkerTest, SecondEpochKeepsWeightsAndGivesTheSameDigests) {
  const auto workers = StartWorkers(2);
  const Case golden = GoldenCases(1)[0];
  std::vector<uint64_t> digests;
  for (int epoch = 0; epoch < 2; ++epoch) {
    const auto driver = Open(workers);
    ASSERT_TRUE(driver.ok()) << driver.status();
    EXPECT_EQ((*driver)->ready().warm(), epoch == 1);
    digests.push_back(Run(**driver, OpenOp(0, golden.prompt)).digest());
    EXPECT_TRUE((*driver)->Close().ok());
  }
  EXPECT_EQ(digests[0], digests[1]);
}

TEST_F(RealWorkerTest, WrongModelDirectoryFailsTheWorkerWithItsName) {
  const auto workers = StartWorkers(1);
  DriverGroup group;
  group.workers = {workers[0]->server->address()};
  group.model_dir = absl::StrCat(kModelDir, "/no_such_folder");
  const auto refused = WorkerDriver::Open(group);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kNotFound) << refused.status();
  EXPECT_THAT(std::string(refused.status().message()), ::testing::HasSubstr("no_such_folder"));
  EXPECT_EQ(workers[0]->core->state(), WorkerState::kFailed);
}

// Each fault is armed on rank 1 and must show in the digests of the next op.
TEST_F(RealWorkerTest, FaultOnOneRankShowsInTheNextDigest) {
  const std::vector<Case> cases = GoldenCases(1);
  for (const auto target :
       {proto::FlipBitRequest::REPLICATED_WEIGHT, proto::FlipBitRequest::CACHED_ROW,
        proto::FlipBitRequest::REDUCED_SUM}) {
    for (const uint32_t bit : {31u, 30u}) {
      const auto workers = StartWorkers(2);
      const auto driver = Open(workers);
      ASSERT_TRUE(driver.ok()) << driver.status();
      Run(**driver, OpenOp(0, cases[0].prompt));
      Run(**driver, RoundOp(0, 3));
      const auto hooks =
          proto::ShardWorkerTestHooks::NewStub(MakeChannel(workers[1]->server->address()));
      proto::FlipBitRequest request;
      request.set_target(target);
      request.set_bit(bit);
      proto::FlipBitReply reply;
      grpc::ClientContext context;
      ASSERT_TRUE(hooks->FlipBit(&context, request, &reply).ok());
      const auto results = (*driver)->RunOp(RoundOp(0, 0));
      ASSERT_TRUE(results.ok()) << results.status();
      EXPECT_NE((*results)[0].digest(), (*results)[1].digest())
          << proto::FlipBitRequest::Target_Name(target) << " bit " << bit;
    }
  }
}

TEST_F(RealWorkerTest, RecordedLogReplaysBitForBit) {
  const TempDir dir;
  const Case golden = GoldenCases(2)[1];
  uint64_t epoch = 0;
  {
    const auto workers = StartWorkers(2, dir.path());
    const auto driver = Open(workers);
    ASSERT_TRUE(driver.ok()) << driver.status();
    epoch = (*driver)->epoch();
    Generate(**driver, golden, 3);
    ASSERT_TRUE((*driver)->Close().ok());
  }
  const auto log = ReadOpLog((dir / absl::StrCat("epoch-", epoch, "-rank-0.oplog")).string());
  ASSERT_TRUE(log.ok()) << log.status();
  EXPECT_EQ(log->group.world, 2);
  EXPECT_EQ(log->group.model_dir, kModelDir);
  ASSERT_GT(log->ops.size(), 1u);
  const auto workers = StartWorkers(2);
  const auto driver = Open(workers);
  ASSERT_TRUE(driver.ok()) << driver.status();
  for (const RecordedOp& op : log->ops) {
    ASSERT_TRUE(op.has_result);
    const auto results = (*driver)->RunOp(op.bytes);
    ASSERT_TRUE(results.ok()) << results.status();
    EXPECT_EQ((*results)[0].digest(), op.digest) << "op " << op.op_id;
    EXPECT_EQ((*results)[1].digest(), op.digest) << "op " << op.op_id;
  }
}

}  // namespace
}  // namespace twinspark
