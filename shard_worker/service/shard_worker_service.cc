// See shard_worker_service.h.
#include "shard_worker/service/shard_worker_service.h"

#include <algorithm>
#include <chrono>
#include <fstream>
#include <thread>
#include <utility>

#include <limits.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

#include "common/build_info.h"
#include "common/clock.h"
#include "common/limits.h"
#include "common/log.h"
#include "common/rpc/grpc_status.h"
#include "common/status_macros.h"
#include "proto/shard_worker.grpc.pb.h"
#include "shard_worker/service/result_writer.h"
#include "shard_worker/service/steps_reactor.h"

namespace twinspark {
namespace {

constexpr size_t kMaxTextBytes = 4096;  // paths, endpoints, digests

void WriteProcess(const ProcessFacts& facts, proto::ProcessInfo* wire) {
  wire->set_build(facts.build);
  wire->set_protocol_version(kWorkerProtocolVersion);
  wire->set_host(facts.host);
  wire->set_boot_id(facts.boot_id);
  wire->set_pid(facts.pid);
  wire->set_start_unix_ms(facts.start_unix_ms);
}

absl::Status CheckText(const char* field, const std::string& text) {
  if (text.size() <= kMaxTextBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(field, " has ", text.size(), " bytes, allowed ", kMaxTextBytes));
}

absl::StatusOr<int> ReadLimit(const char* field, uint32_t value, int64_t max) {
  if (value <= max) return static_cast<int>(value);
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, ", allowed up to ", max));
}

absl::StatusOr<GroupLimits> ReadLimits(const proto::Limits& wire) {
  GroupLimits read;
  ASSIGN_OR_RETURN(read.num_slots,
                   ReadLimit("limits.num_slots", wire.num_slots(), limits::kMaxSlots));
  ASSIGN_OR_RETURN(read.num_pages, ReadLimit("limits.num_pages", wire.num_pages(), INT_MAX));
  ASSIGN_OR_RETURN(read.max_round_rows, ReadLimit("limits.max_round_rows", wire.max_round_rows(),
                                                  limits::kMaxRoundRows));
  ASSIGN_OR_RETURN(read.max_short_prefill_rows,
                   ReadLimit("limits.max_short_prefill_rows", wire.max_short_prefill_rows(),
                             limits::kMaxShortPrefillRows));
  ASSIGN_OR_RETURN(read.max_chunk_rows, ReadLimit("limits.max_chunk_rows", wire.max_chunk_rows(),
                                                  limits::kMaxChunkRows));
  ASSIGN_OR_RETURN(read.max_context,
                   ReadLimit("limits.max_context", wire.max_context(), limits::kMaxContext));
  return read;
}

absl::StatusOr<GroupConfig> ReadConfigure(const proto::ConfigureRequest& wire) {
  GroupConfig config;
  if (wire.group_endpoints_size() > limits::kMaxRanks) {
    return absl::InvalidArgumentError(absl::StrCat("group_endpoints has ",
                                                   wire.group_endpoints_size(),
                                                   " entries, allowed ", limits::kMaxRanks));
  }
  for (const std::string& endpoint : wire.group_endpoints()) {
    RETURN_IF_ERROR(CheckText("group_endpoints", endpoint));
  }
  RETURN_IF_ERROR(CheckText("group_secret", wire.group_secret()));
  RETURN_IF_ERROR(CheckText("model_dir", wire.model_dir()));
  RETURN_IF_ERROR(CheckText("engram_dir", wire.engram_dir()));
  RETURN_IF_ERROR(CheckText("engram_endpoint", wire.engram_endpoint()));
  RETURN_IF_ERROR(CheckText("expected_config_digest", wire.expected_config_digest()));
  RETURN_IF_ERROR(CheckText("expected_weights_digest", wire.expected_weights_digest()));
  RETURN_IF_ERROR(CheckText("simd_target", wire.simd_target()));
  ASSIGN_OR_RETURN(config.rank, ReadLimit("rank", wire.rank(), limits::kMaxRanks - 1));
  ASSIGN_OR_RETURN(config.world, ReadLimit("world", wire.world(), limits::kMaxRanks));
  ASSIGN_OR_RETURN(config.limits, ReadLimits(wire.limits()));
  for (const uint32_t ms : {wire.heartbeat_interval_ms(), wire.gateway_silence_ms(),
                            wire.engram_wait_ms(), wire.communicator_wait_ms()}) {
    RETURN_IF_ERROR(ReadLimit("a wait in ms", ms, limits::kOpDeadlineMsMax).status());
  }
  config.epoch = wire.epoch();
  config.group_endpoints.assign(wire.group_endpoints().begin(), wire.group_endpoints().end());
  config.group_secret = wire.group_secret();
  config.model_dir = wire.model_dir();
  config.engram_dir = wire.engram_dir();
  config.expected_config_digest = wire.expected_config_digest();
  config.expected_weights_digest = wire.expected_weights_digest();
  config.simd_target = wire.simd_target();
  config.f32_numerics = wire.numerics() == proto::NUMERICS_F32;
  config.memory_budget_bytes = wire.memory_budget_bytes();
  config.engram_endpoint = wire.engram_endpoint();
  config.heartbeat_interval_ms = wire.heartbeat_interval_ms();
  config.gateway_silence_ms = wire.gateway_silence_ms();
  config.engram_wait_ms = wire.engram_wait_ms();
  config.communicator_wait_ms = wire.communicator_wait_ms();
  config.reload_weights = wire.reload_weights();
  return config;
}

// Of this process; 0 where /proc does not say.
uint64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t total_pages = 0;
  uint64_t resident_pages = 0;
  if (!(file >> total_pages >> resident_pages)) return 0;
  return resident_pages * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

using SteppingService = proto::ShardWorker::WithCallbackMethod_Steps<proto::ShardWorker::Service>;

class ShardWorkerService final : public SteppingService {
 public:
  ShardWorkerService(WorkerCore& core, ProcessFacts process)
      : core_(core), process_(std::move(process)) {}

  grpc::Status Hello(grpc::ServerContext*,
                     const proto::HelloRequest* request,
                     proto::HelloReply* reply) override {
    // A different build is refused by the gateway, which sees both values; here they are logged.
    if (request->build() != process_.build ||
        request->protocol_version() != kWorkerProtocolVersion) {
      LOG_WARNING << "hello from another build gateway=\""
                  << request->build().substr(0, kMaxTextBytes) << "\" worker=\"" << process_.build
                  << "\" gateway_protocol=" << request->protocol_version()
                  << " worker_protocol=" << kWorkerProtocolVersion;
    }
    WriteProcess(process_, reply->mutable_process());
    const BackendFacts facts = core_.backend().Facts();
    reply->set_backend(facts.backend);
    for (const std::string& target : facts.simd_targets)
      reply->add_simd_targets(target);
    reply->set_device_name(facts.device_name);
    reply->set_memory_total_bytes(facts.memory_total_bytes);
    reply->set_memory_available_bytes(facts.memory_available_bytes);
    reply->set_state(ToWire(core_.state()));
    reply->set_weights_digest(core_.backend().ResidentWeightsDigest());
    reply->set_config_digest(core_.backend().ResidentConfigDigest());
    return grpc::Status::OK;
  }

  grpc::Status PrepareGroup(grpc::ServerContext*,
                            const proto::PrepareGroupRequest* request,
                            proto::PrepareGroupReply* reply) override {
    const auto rank = static_cast<int>(std::min<uint32_t>(request->rank(), INT_MAX));
    const auto world = static_cast<int>(std::min<uint32_t>(request->world(), INT_MAX));
    absl::StatusOr<std::string> endpoint = core_.PrepareGroup(request->epoch(), rank, world);
    if (!endpoint.ok()) return ToGrpcStatus(endpoint.status());
    reply->set_endpoint(*std::move(endpoint));
    return grpc::Status::OK;
  }

  grpc::Status Configure(grpc::ServerContext* context,
                         const proto::ConfigureRequest* request,
                         grpc::ServerWriter<proto::ConfigureEvent>* writer) override {
    absl::StatusOr<GroupConfig> config = ReadConfigure(*request);
    if (!config.ok()) return ToGrpcStatus(config.status());
    const auto progress = [writer](WorkerState state, const LoadState& load) {
      proto::ConfigureEvent event;
      WriteProgress(state, load, event.mutable_progress());
      writer->Write(event);  // a caller that went away is seen by `cancelled`
    };
    const absl::StatusOr<ReadyReport> report =
        core_.Configure(*config, progress, [context] { return context->IsCancelled(); });
    if (!report.ok()) return ToGrpcStatus(report.status());
    proto::ConfigureEvent event;
    WriteReady(*report, event.mutable_ready());
    writer->Write(event);
    return grpc::Status::OK;
  }

  grpc::ServerBidiReactor<proto::GatewayMessage, proto::WorkerMessage>* Steps(
      grpc::CallbackServerContext* context) override {
    return NewStepsReactor(core_, context);
  }

  grpc::Status Status(grpc::ServerContext*,
                      const proto::StatusRequest*,
                      proto::StatusReply* reply) override {
    WriteStatus(core_.Status(), reply);
    WriteProcess(process_, reply->mutable_process());
    reply->set_resident_bytes(ResidentBytes());
    return grpc::Status::OK;
  }

  grpc::Status Drain(grpc::ServerContext* context,
                     const proto::DrainRequest* request,
                     proto::DrainReply*) override {
    if (absl::Status bad = CheckText("reason", request->reason()); !bad.ok())
      return ToGrpcStatus(bad);
    core_.Drain(absl::StrCat("asked by ", context->peer(), ": ", request->reason()));
    while (!core_.exiting() && !context->IsCancelled()) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    return grpc::Status::OK;
  }

  grpc::Status Reset(grpc::ServerContext* context,
                     const proto::ResetRequest* request,
                     proto::ResetReply*) override {
    if (absl::Status bad = CheckText("reason", request->reason()); !bad.ok())
      return ToGrpcStatus(bad);
    return ToGrpcStatus(
        core_.Reset(absl::StrCat("asked by ", context->peer(), ": ", request->reason()),
                    request->drop_weights()));
  }

 private:
  WorkerCore& core_;
  const ProcessFacts process_;
};

class TestHooksService final : public proto::ShardWorkerTestHooks::Service {
 public:
  explicit TestHooksService(WorkerCore& core) : core_(core) {}

  grpc::Status FlipBit(grpc::ServerContext*,
                       const proto::FlipBitRequest* request,
                       proto::FlipBitReply* reply) override {
    Fault fault;
    switch (request->target()) {
      case proto::FlipBitRequest::CACHED_ROW:
        fault.target = Fault::Target::kCachedRow;
        break;
      case proto::FlipBitRequest::REDUCED_SUM:
        fault.target = Fault::Target::kReducedSum;
        break;
      default:
        fault.target = Fault::Target::kReplicatedWeight;
    }
    fault.bit = static_cast<int>(request->bit() % 32);
    fault.slot = static_cast<int>(request->slot() % limits::kMaxSlots);
    const absl::Status armed = core_.InjectFault(fault);
    if (!armed.ok()) return ToGrpcStatus(armed);
    reply->set_what("armed: strikes before the next op; the worker's log says what was flipped");
    return grpc::Status::OK;
  }

 private:
  WorkerCore& core_;
};

std::string FirstLine(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

}  // namespace

ProcessFacts ProcessFacts::Own() {
  ProcessFacts facts;
  facts.build = BuildId();
  char host[HOST_NAME_MAX + 1] = {};
  if (gethostname(host, sizeof(host) - 1) == 0) facts.host = host;
  facts.boot_id = FirstLine("/proc/sys/kernel/random/boot_id");
  facts.pid = static_cast<uint32_t>(getpid());
  facts.start_unix_ms = UnixTimeUs() / 1000;
  return facts;
}

std::unique_ptr<grpc::Service> NewShardWorkerService(WorkerCore& core,
                                                     const ProcessFacts& process) {
  return std::make_unique<ShardWorkerService>(core, process);
}

std::unique_ptr<grpc::Service> NewTestHooksService(WorkerCore& core) {
  return std::make_unique<TestHooksService>(core);
}

}  // namespace twinspark
