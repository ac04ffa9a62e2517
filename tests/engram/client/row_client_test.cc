// The whole path of a worker's rows in one process: gRPC Hello, comparison with the model, attach,
// rows, status; then what a worker meets when the service is another one, is gone, or was reloaded.
#include "shard_worker/engram/row_client.h"

#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <grpcpp/client_context.h>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/model_config.h"
#include "common/rpc/grpc_channel.h"
#include "common/rpc/grpc_server.h"
#include "common/status_macros.h"
#include "common/testing/temp_dir.h"
#include "engram_service/read/local_rows.h"
#include "engram_service/service/engram_service.h"
#include "engram_service/service/table_watch.h"
#include "proto/engram.grpc.pb.h"
#include "shard_worker/engram/engram_rpc.h"

namespace twinspark {
namespace {

namespace pb = proto::engram;
using ::testing::HasSubstr;

class RowClientTest : public ::testing::Test {
 protected:
  void SetUp() override {
    engram::ServingOptions options;
    options.tables = {TWINSPARK_DEMO_MODEL, "", 0, 2};
    StartService(options);
  }
  void StartService(const engram::ServingOptions& options) {
    service_ = std::make_unique<engram::EngramServiceImpl>(options);
    ASSERT_TRUE(service_->Open().ok());
    auto server = GrpcServer::Start("127.0.0.1:0", {service_.get()});
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    auto config = LoadModelConfig(TWINSPARK_DEMO_MODEL);
    ASSERT_TRUE(config.ok()) << config.status();
    config_ = *config;
    reference_ = engram::LocalRows::Over(service_->serving()->tables());
    options_ = {server_->address(), 0, 2, 48, 512};
    stub_ = pb::EngramService::NewStub(MakeChannel(server_->address()));
  }
  void TearDown() override { server_->Shutdown(std::chrono::milliseconds(100)); }

  pb::StatusReply Status() {
    grpc::ClientContext context;
    pb::StatusReply reply;
    EXPECT_TRUE(stub_->Status(&context, {}, &reply).ok());
    return reply;
  }

  // A prompt of `count` tokens at `position`, rows compared with the engine's.
  void ExpectRows(RowClient& client, int64_t position, size_t count) {
    std::vector<int32_t> ids;
    const size_t history = static_cast<size_t>(std::min<int64_t>(position, 3));
    for (size_t i = 0; i < history + count; ++i) {
      ids.push_back(static_cast<int32_t>((i * 37 + static_cast<size_t>(position)) % 4096));
    }
    RowRange range;
    range.first_position = position;
    range.history = std::span(ids).first(history);
    range.ids = std::span(ids).subspan(history);
    ASSERT_TRUE(client.Request(std::span(&range, 1), RowClass::kDecode).ok());
    const engram::SequenceView view{
        static_cast<uint32_t>(position), static_cast<uint32_t>(history), ids, {}};
    ASSERT_TRUE(reference_->Gather(std::span(&view, 1)).ok());
    for (int layer = 0; layer < 2; ++layer) {
      const auto rows = client.Rows(layer);
      ASSERT_TRUE(rows.ok()) << rows.status();
      const auto weights = reference_->weights(layer);
      const auto scales = reference_->scales(layer);
      EXPECT_EQ(memcmp(rows->values, weights.data(), weights.size()), 0);
      EXPECT_EQ(memcmp(rows->scales, scales.data(), scales.size()), 0);
    }
  }

  std::unique_ptr<engram::EngramServiceImpl> service_;
  std::unique_ptr<GrpcServer> server_;
  std::unique_ptr<pb::EngramService::Stub> stub_;
  std::unique_ptr<engram::LocalRows> reference_;
  ModelConfig config_;
  RowClientOptions options_;
};

TEST_F(RowClientTest, RowsComeThroughSharedMemoryAndNotThroughGather) {
  auto client = RowClient::Connect(config_, options_);
  ASSERT_TRUE(client.ok()) << client.status();
  ExpectRows(**client, 0, 1);
  ExpectRows(**client, 1, 3);
  ExpectRows(**client, 7, 500);
  const RowClientState state = (*client)->state();
  EXPECT_EQ(state.transport, "shm");
  EXPECT_EQ(state.tier, "native");
  EXPECT_EQ(state.requests, 3u);
  EXPECT_EQ(state.tokens, 504u);
  EXPECT_EQ(state.errors, 0u);
  const pb::StatusReply status = Status();
  EXPECT_EQ(status.state(), pb::SERVICE_READY);
  EXPECT_EQ(status.attachments(), 1u);
  EXPECT_EQ(status.shm_requests(), 3u);
  EXPECT_EQ(status.shm_tokens(), 504u);
  EXPECT_EQ(status.rpc_gathers(), 0u);
}

TEST_F(RowClientTest, BytesOverGrpcAreTheSameRowsAndAreCounted) {
  const EngramRpc rpc(server_->address());
  const auto hello = rpc.Hello("test");
  ASSERT_TRUE(hello.ok()) << hello.status();
  std::vector<int32_t> ids(2503);
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<int32_t>(i * 91 % 4096);
  std::vector<uint8_t> dead(ids.size());
  dead[1024] = 1;
  RowRange range;
  range.first_position = 50;
  range.history = std::span(ids).first(3);
  range.ids = std::span(ids).subspan(3);
  range.dead = dead;
  const auto rows = rpc.Gather(std::span(&range, 1), *hello);
  ASSERT_TRUE(rows.ok()) << rows.status();
  const engram::SequenceView view{50, 3, ids, dead};
  ASSERT_TRUE(reference_->Gather(std::span(&view, 1)).ok());
  for (size_t layer = 0; layer < 2; ++layer) {
    const auto weights = reference_->weights(static_cast<int>(layer));
    ASSERT_EQ((*rows)[layer].values.size(), weights.size());
    EXPECT_EQ(memcmp((*rows)[layer].values.data(), weights.data(), weights.size()), 0);
  }
  EXPECT_EQ(Status().rpc_gathers(), 3u);
}

TEST_F(RowClientTest, AnotherModelIsRefusedWithBothValues) {
  const auto refusal = [&](ModelConfig config, RowClientOptions options) {
    const auto client = RowClient::Connect(config, options);
    EXPECT_EQ(client.status().code(), absl::StatusCode::kFailedPrecondition) << client.status();
    return std::string(client.status().message());
  };
  RowClientOptions other_rank = options_;
  other_rank.rank = 1;
  EXPECT_THAT(refusal(config_, other_rank), HasSubstr("0 of 2; this worker's model has 1 of 2"));
  ModelConfig other_rows = config_;
  other_rows.engram_num_embeddings[1] += 2;
  EXPECT_THAT(refusal(other_rows, options_), HasSubstr("61854"));
  ModelConfig other_width = config_;
  other_width.engram_head_dim = 64;
  EXPECT_THAT(refusal(other_width, options_), HasSubstr("64"));
  RowClientOptions nobody = options_;
  nobody.endpoint = "127.0.0.1:1";
  EXPECT_EQ(RowClient::Connect(config_, nobody).status().code(), absl::StatusCode::kUnavailable);
}

TEST_F(RowClientTest, ReloadEndsTheAttachmentAndTheNextOneWorks) {
  auto client = RowClient::Connect(config_, options_);
  ASSERT_TRUE(client.ok()) << client.status();
  ExpectRows(**client, 0, 4);
  reference_.reset();
  grpc::ClientContext context;
  pb::ReloadReply reply;
  ASSERT_TRUE(stub_->Reload(&context, {}, &reply).ok());
  EXPECT_NE(reply.service_epoch(), (*client)->state().service_epoch);
  reference_ = engram::LocalRows::Over(service_->serving()->tables());
  const std::vector<int32_t> ids = {1, 2};
  RowRange range;
  range.ids = ids;
  absl::Status status = (*client)->Request(std::span(&range, 1), RowClass::kDecode);
  if (status.ok()) status = (*client)->Rows(0).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable) << status;
  EXPECT_EQ((*client)->state().errors, 1u);
  auto again = RowClient::Connect(config_, options_);
  ASSERT_TRUE(again.ok()) << again.status();
  ExpectRows(**again, 3, 4);
}

// The same service over tables that this test may write to.
class ChangedTablesTest : public RowClientTest {
 protected:
  void SetUp() override {
    std::filesystem::copy(TWINSPARK_DEMO_MODEL, dir_.path(),
                          std::filesystem::copy_options::recursive);
    engram::ServingOptions options;
    options.tables = {dir_.path(), "", 0, 2};
    options.cache_gib = 1.0 / 64;
    StartService(options);
    table_ = service_->serving()->tables().table(0).path();
  }
  void TearDown() override {
    reference_.reset();
    RowClientTest::TearDown();
  }
  static std::string Content(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  // Every row becomes another valid one: the top bit of every byte, header untouched.
  void WriteOtherRows() const {
    std::string bytes = Content(table_);
    uint64_t header_bytes = 0;
    memcpy(&header_bytes, bytes.data(), 8);
    for (size_t i = 8 + header_bytes; i < bytes.size(); ++i) {
      if ((bytes[i] & 0x7f) != 0x7f) bytes[i] = static_cast<char>(bytes[i] ^ 0x80);
    }
    std::fstream file(table_, std::ios::binary | std::ios::in | std::ios::out);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  }
  absl::Status Ask(RowClient& client) {
    const std::vector<int32_t> ids = {5, 6, 7};
    RowRange range;
    range.ids = ids;
    RETURN_IF_ERROR(client.Request(std::span(&range, 1), RowClass::kDecode));
    for (int layer = 0; layer < 2; ++layer)
      RETURN_IF_ERROR(client.Rows(layer).status());
    return absl::OkStatus();
  }

  TempDir dir_;
  std::string table_;
};

TEST_F(ChangedTablesTest, RowsWrittenOverAreNeverServedAndTheNextEpochRefusesThem) {
  auto client = RowClient::Connect(config_, options_);
  ASSERT_TRUE(client.ok()) << client.status();
  ASSERT_TRUE(Ask(**client).ok());  // now also in the cache
  options_.expected = (*client)->content();
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  WriteOtherRows();
  EXPECT_THAT(Ask(**client).message(), HasSubstr("changed on disk"));
  EXPECT_EQ(Status().state(), pb::SERVICE_FAILED);
  EXPECT_THAT(Status().reason(), HasSubstr(table_ + " changed on disk"));
  // Before the tables are opened again nobody attaches.
  const auto early = RowClient::Connect(config_, options_);
  EXPECT_FALSE(early.ok());
  // Opened again: right for a worker that starts now, another table for one that was there before.
  service_->CheckTables();
  EXPECT_EQ(Status().state(), pb::SERVICE_DEGRADED);
  EXPECT_THAT(Status().reason(), HasSubstr("changed on disk"));
  EXPECT_EQ(service_->table_changes(), 1u);
  const auto late = RowClient::Connect(config_, options_);
  EXPECT_EQ(late.status().code(), absl::StatusCode::kFailedPrecondition) << late.status();
  EXPECT_THAT(late.status().message(), HasSubstr("not those of the last epoch"));
  EXPECT_THAT(late.status().message(), HasSubstr("canary"));
  options_.expected.reset();
  auto fresh = RowClient::Connect(config_, options_);
  ASSERT_TRUE(fresh.ok()) << fresh.status();
  reference_ = engram::LocalRows::Over(service_->serving()->tables());
  ExpectRows(**fresh, 7, 40);
  grpc::ClientContext context;
  pb::ReloadReply reply;
  reference_.reset();
  ASSERT_TRUE(stub_->Reload(&context, {}, &reply).ok());
  EXPECT_EQ(Status().state(), pb::SERVICE_READY);
}

TEST_F(ChangedTablesTest, AnIdleServiceNoticesAndItsWorkerToo) {
  auto client = RowClient::Connect(config_, options_);
  ASSERT_TRUE(client.ok()) << client.status();
  const engram::TableWatch watch(*service_, std::chrono::milliseconds(20));
  EXPECT_TRUE((*client)->CheckAlive().ok());
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  WriteOtherRows();
  const auto give_up = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while ((*client)->CheckAlive().ok() && std::chrono::steady_clock::now() < give_up)
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_FALSE((*client)->CheckAlive().ok());
  EXPECT_FALSE(Ask(**client).ok());
}

// Written over with the time of modification put back, as `rsync -t --inplace` does; of a chmod or
// a new hard link it cannot be told apart, so these are refused too. The text says which file.
TEST_F(ChangedTablesTest, AnOldTimeOfModificationDoesNotHideAChange) {
  auto client = RowClient::Connect(config_, options_);
  ASSERT_TRUE(client.ok()) << client.status();
  reference_.reset();
  // One byte, far from the canary's few rows.
  const auto write_one_byte = [&] {
    const auto modified = std::filesystem::last_write_time(table_);
    std::fstream file(table_, std::ios::binary | std::ios::in | std::ios::out);
    file.seekp(-1, std::ios::end);
    file.put(1);
    file.close();
    std::filesystem::last_write_time(table_, modified);
  };
  const std::vector<std::function<void()>> changes = {
      write_one_byte,
      [&] { std::filesystem::permissions(table_, std::filesystem::perms::owner_read); },
      [&] { std::filesystem::create_hard_link(table_, dir_.path() + "/link"); },
  };
  for (const auto& change : changes) {
    options_.expected.reset();
    auto before = RowClient::Connect(config_, options_);
    ASSERT_TRUE(before.ok()) << before.status();
    options_.expected = (*before)->content();
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    change();
    service_->CheckTables();
    const auto after = RowClient::Connect(config_, options_);
    EXPECT_EQ(after.status().code(), absl::StatusCode::kFailedPrecondition) << after.status();
    EXPECT_THAT(after.status().message(), HasSubstr("now " + table_ + ": inode "));
    EXPECT_THAT(after.status().message(), HasSubstr("was " + table_ + ": inode "));
    EXPECT_THAT(after.status().message(), HasSubstr("restart all workers"));
  }
}

// A new file under the old name: the open one is still whole and is served; Reload takes the new
// one, which is another table to a worker that was there before.
TEST_F(ChangedTablesTest, AReplacedFileIsSaidAndNotMixedIn) {
  auto client = RowClient::Connect(config_, options_);
  ASSERT_TRUE(client.ok()) << client.status();
  options_.expected = (*client)->content();
  const std::string old_path = dir_.path() + "/old";
  std::filesystem::rename(table_, old_path);
  std::filesystem::copy_file(old_path, table_);
  WriteOtherRows();
  service_->CheckTables();  // the rename moved the inode's time: opened again
  const auto other = RowClient::Connect(config_, options_);
  EXPECT_THAT(other.status().message(), HasSubstr("not those of the last epoch"));
}

TEST_F(ChangedTablesTest, ATableThatIsGoneStaysFailedUntilItIsBack) {
  auto client = RowClient::Connect(config_, options_);
  ASSERT_TRUE(client.ok()) << client.status();
  options_.expected = (*client)->content();
  reference_.reset();
  const std::string bytes = Content(table_);
  const auto modified = std::filesystem::last_write_time(table_);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  std::filesystem::resize_file(table_, bytes.size() / 2);
  EXPECT_FALSE(Ask(**client).ok());
  service_->CheckTables();
  EXPECT_EQ(Status().state(), pb::SERVICE_FAILED);
  EXPECT_THAT(Status().reason(), HasSubstr("opening it again"));
  EXPECT_FALSE(RowClient::Connect(config_, options_).ok());
  std::ofstream(table_, std::ios::binary) << bytes;
  std::filesystem::last_write_time(table_, modified);
  service_->CheckTables();
  // Back for a worker that starts anew; to the old one its change time says that it was written to.
  EXPECT_THAT(RowClient::Connect(config_, options_).status().message(),
              HasSubstr("not those of the last epoch"));
  options_.expected.reset();
  auto again = RowClient::Connect(config_, options_);
  ASSERT_TRUE(again.ok()) << again.status();
  reference_ = engram::LocalRows::Over(service_->serving()->tables());
  ExpectRows(**again, 0, 10);
}

TEST_F(RowClientTest, DrainServesWhoIsThereAndRefusesWhoComes) {
  auto client = RowClient::Connect(config_, options_);
  ASSERT_TRUE(client.ok()) << client.status();
  grpc::ClientContext context;
  pb::DrainReply reply;
  ASSERT_TRUE(stub_->Drain(&context, {}, &reply).ok());
  EXPECT_EQ(Status().state(), pb::SERVICE_DRAINING);
  ExpectRows(**client, 0, 4);
  const auto late = RowClient::Connect(config_, options_);
  EXPECT_EQ(late.status().code(), absl::StatusCode::kFailedPrecondition) << late.status();
}

TEST_F(RowClientTest, BadCallsAreInvalidArguments) {
  const auto code = [&](const pb::GatherRequest& request) {
    grpc::ClientContext context;
    pb::GatherReply reply;
    return stub_->Gather(&context, request, &reply).error_code();
  };
  pb::GatherRequest request;
  EXPECT_EQ(code(request), grpc::StatusCode::INVALID_ARGUMENT);
  pb::Sequence& sequence = *request.add_sequences();
  sequence.add_tokens(5);
  EXPECT_EQ(code(request), grpc::StatusCode::OK);
  request.add_layer_ids(2);
  EXPECT_EQ(code(request), grpc::StatusCode::INVALID_ARGUMENT);
  request.clear_layer_ids();
  request.set_service_epoch(1);
  EXPECT_EQ(code(request), grpc::StatusCode::FAILED_PRECONDITION);
  request.set_service_epoch(0);
  sequence.add_tokens(4096);
  EXPECT_EQ(code(request), grpc::StatusCode::INVALID_ARGUMENT);
  sequence.clear_tokens();
  for (int i = 0; i < 1025; ++i)
    sequence.add_tokens(1);
  EXPECT_EQ(code(request), grpc::StatusCode::INVALID_ARGUMENT);
  sequence.clear_tokens();
  sequence.add_tokens(4294967295u);
  EXPECT_EQ(code(request), grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_F(RowClientTest, CanaryAndVerify) {
  grpc::ClientContext context;
  pb::CanaryReply canary;
  ASSERT_TRUE(stub_->Canary(&context, {}, &canary).ok());
  EXPECT_EQ(canary.digest(), canary.expected());
  EXPECT_EQ(canary.digest().size(), 32u);
  grpc::ClientContext verify_context;
  pb::VerifyRequest request;
  request.set_mode("quick");
  const auto reader = stub_->Verify(&verify_context, request);
  pb::VerifyProgress progress;
  while (reader->Read(&progress)) {
  }
  EXPECT_TRUE(reader->Finish().ok());
  EXPECT_TRUE(progress.finished());
  EXPECT_EQ(progress.errors(), 0u);
}

}  // namespace
}  // namespace twinspark
