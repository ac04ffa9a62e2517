// See worker_driver.h.
#include "tests/replay/worker_driver.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include <grpcpp/client_context.h>

#include "absl/strings/str_cat.h"

#include "common/build_info.h"
#include "common/clock.h"
#include "common/limits.h"
#include "common/rpc/grpc_channel.h"
#include "common/rpc/grpc_status.h"
#include "common/status_macros.h"
#include "proto/shard_worker.grpc.pb.h"

namespace twinspark {
namespace {

constexpr auto kShortCall = std::chrono::seconds(10 * limits::kTimeScale);
constexpr auto kLongCall = std::chrono::seconds(600);

std::chrono::system_clock::time_point In(std::chrono::seconds duration) {
  return std::chrono::system_clock::now() + duration;
}

}  // namespace

struct WorkerDriver::Rank {
  int rank = 0;
  std::unique_ptr<proto::ShardWorker::Stub> stub;
  proto::ConfigureReady ready;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReaderWriter<proto::GatewayMessage, proto::WorkerMessage>> stream;
  std::mutex write_mutex;  // one write at a time
  std::atomic<bool> stop{false};
  std::thread heartbeats;
  bool finished = false;

  ~Rank() {
    stop.store(true);
    if (heartbeats.joinable()) heartbeats.join();
    if (stream == nullptr || finished) return;
    context.TryCancel();
    Finish().IgnoreError();
  }

  bool Write(const proto::GatewayMessage& message) {
    const std::lock_guard<std::mutex> lock(write_mutex);
    return stream->Write(message);
  }

  absl::Status Finish() {
    proto::WorkerMessage message;
    while (stream->Read(&message)) {
    }
    finished = true;
    return FromGrpcStatus(stream->Finish());
  }

  absl::StatusOr<proto::OpResult> NextResult() {
    proto::WorkerMessage message;
    while (stream->Read(&message)) {
      if (message.has_result()) return message.result();
    }
    finished = true;
    const absl::Status end = FromGrpcStatus(stream->Finish());
    return absl::Status(end.ok() ? absl::StatusCode::kUnavailable : end.code(),
                        absl::StrCat("rank ", rank, " ended the stream: ", end.ToString()));
  }

  absl::Status Configure(const proto::ConfigureRequest& request) {
    grpc::ClientContext configure;
    configure.set_deadline(In(kLongCall));
    const auto reader = stub->Configure(&configure, request);
    proto::ConfigureEvent event;
    while (reader->Read(&event)) {
      if (event.has_ready()) ready = event.ready();
    }
    const absl::Status status = FromGrpcStatus(reader->Finish());
    if (status.ok()) return status;
    return absl::Status(status.code(),
                        absl::StrCat("rank ", rank, ": ", std::string(status.message())));
  }

  absl::Status OpenSteps(uint64_t epoch) {
    stream = stub->Steps(&context);
    proto::GatewayMessage open;
    open.mutable_open()->set_epoch(epoch);
    open.mutable_open()->set_config_digest(ready.config_digest());
    open.mutable_open()->set_weights_digest(ready.weights_digest());
    proto::WorkerMessage message;
    if (!Write(open) || !stream->Read(&message) || !message.has_accepted()) {
      return absl::UnavailableError(absl::StrCat("rank ", rank, ": ", Finish().ToString()));
    }
    heartbeats = std::thread([this] {
      for (uint64_t i = 1; !stop.load(); ++i) {
        proto::GatewayMessage beat;
        beat.mutable_heartbeat()->set_sequence(i);
        Write(beat);
        std::this_thread::sleep_for(std::chrono::milliseconds(limits::kHeartbeatPeriodMs / 2));
      }
    });
    return absl::OkStatus();
  }
};

WorkerDriver::WorkerDriver() = default;
WorkerDriver::~WorkerDriver() = default;

const proto::ConfigureReady& WorkerDriver::ready() const {
  return ranks_.front()->ready;
}
uint64_t WorkerDriver::epoch() const {
  return epoch_;
}

absl::StatusOr<std::unique_ptr<WorkerDriver>> WorkerDriver::Open(const DriverGroup& group) {
  std::unique_ptr<WorkerDriver> driver(new WorkerDriver());
  driver->epoch_ = static_cast<uint64_t>(UnixTimeUs());
  proto::ConfigureRequest request;
  request.set_epoch(driver->epoch_);
  request.set_world(static_cast<uint32_t>(group.workers.size()));
  request.set_group_secret(absl::StrCat("replay-", driver->epoch_));
  request.set_model_dir(group.model_dir);
  request.set_engram_dir(group.engram_dir);
  request.set_simd_target(group.simd_target);
  request.set_numerics(group.f32_numerics ? proto::NUMERICS_F32 : proto::NUMERICS_BF16);
  *request.mutable_limits() = group.limits;
  for (size_t i = 0; i < group.workers.size(); ++i) {
    auto rank = std::make_unique<Rank>();
    rank->rank = static_cast<int>(i);
    rank->stub = proto::ShardWorker::NewStub(MakeChannel(group.workers[i]));
    proto::PrepareGroupRequest prepare;
    prepare.set_epoch(driver->epoch_);
    prepare.set_rank(static_cast<uint32_t>(i));
    prepare.set_world(request.world());
    proto::PrepareGroupReply reply;
    grpc::ClientContext context;
    context.set_deadline(In(kShortCall));
    RETURN_IF_ERROR(FromGrpcStatus(rank->stub->PrepareGroup(&context, prepare, &reply)));
    request.add_group_endpoints(reply.endpoint());
    driver->ranks_.push_back(std::move(rank));
  }
  std::vector<absl::Status> statuses(group.workers.size());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < group.workers.size(); ++i) {
    proto::ConfigureRequest mine = request;
    mine.set_rank(static_cast<uint32_t>(i));
    if (i < group.engram_endpoints.size()) mine.set_engram_endpoint(group.engram_endpoints[i]);
    threads.emplace_back([&statuses, &rank = *driver->ranks_[i], i, mine = std::move(mine)] {
      statuses[i] = rank.Configure(mine);
    });
  }
  for (std::thread& thread : threads)
    thread.join();
  for (const absl::Status& status : statuses)
    RETURN_IF_ERROR(status);
  for (const auto& rank : driver->ranks_)
    RETURN_IF_ERROR(rank->OpenSteps(driver->epoch_));
  return driver;
}

absl::StatusOr<std::vector<proto::OpResult>> WorkerDriver::RunOp(const std::string& bytes) {
  proto::GatewayMessage message;
  message.set_op(bytes);
  for (const auto& rank : ranks_)
    rank->Write(message);  // a broken stream shows when reading
  std::vector<proto::OpResult> results;
  for (const auto& rank : ranks_) {
    ASSIGN_OR_RETURN(proto::OpResult result, rank->NextResult());
    results.push_back(std::move(result));
  }
  return results;
}

absl::StatusOr<std::vector<proto::OpResult>> WorkerDriver::RunOp(proto::Op op) {
  op.set_op_id(next_op_id_++);
  op.set_deadline_ms(30000);
  return RunOp(op.SerializeAsString());
}

absl::Status WorkerDriver::Close() {
  absl::Status first;
  for (const auto& rank : ranks_) {
    rank->stop.store(true);
    rank->heartbeats.join();
    rank->stream->WritesDone();
  }
  for (const auto& rank : ranks_) {
    const absl::Status end = rank->Finish();
    if (first.ok()) first = end;
  }
  return first;
}

}  // namespace twinspark
