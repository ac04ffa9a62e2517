#include "gateway/engine/worker_client.h"

#include <chrono>
#include <mutex>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/build_info.h"
#include "common/limits.h"
#include "common/rpc/grpc_channel.h"
#include "common/rpc/grpc_status.h"
#include "gateway/engine/step_stream_impl.h"
#include "proto/shard_worker.grpc.pb.h"

namespace twinspark::gateway {
namespace {

// "IDLE" of WORKER_IDLE.
std::string StateName(proto::WorkerState state) {
  const std::string& name = proto::WorkerState_Name(state);
  return name.rfind("WORKER_", 0) == 0 ? name.substr(7) : name;
}

EpochLimits ReadLimits(const proto::Limits& in, const proto::ModelFacts& model) {
  EpochLimits out;
  out.num_slots = static_cast<int>(in.num_slots());
  out.num_pages = static_cast<int32_t>(in.num_pages());
  out.max_round_rows = static_cast<int>(in.max_round_rows());
  out.max_short_prefill_rows = static_cast<int>(in.max_short_prefill_rows());
  out.max_chunk_rows = static_cast<int>(in.max_chunk_rows());
  out.max_context = static_cast<int32_t>(in.max_context());
  out.max_drafts = static_cast<int>(model.max_drafts());
  out.num_layers = static_cast<int>(model.num_layers());
  out.vocab_size = static_cast<int32_t>(model.vocab_size());
  return out;
}

void FillLimits(const EpochLimits& in, proto::Limits& out) {
  out.set_num_slots(static_cast<uint32_t>(in.num_slots));
  out.set_num_pages(static_cast<uint32_t>(in.num_pages));
  out.set_max_round_rows(static_cast<uint32_t>(in.max_round_rows));
  out.set_max_short_prefill_rows(static_cast<uint32_t>(in.max_short_prefill_rows));
  out.set_max_chunk_rows(static_cast<uint32_t>(in.max_chunk_rows));
  out.set_max_context(static_cast<uint32_t>(in.max_context));
}

RowServiceStatus ReadRowService(const proto::RowServiceStatus& in) {
  RowServiceStatus out;
  out.endpoint = in.endpoint();
  out.transport = in.transport();
  out.tier = in.tier();
  out.num_requests = in.requests();
  out.num_errors = in.errors();
  out.last_error = in.last_error();
  out.is_overloaded = in.overloaded();
  out.hash_digest = in.table_digest();
  out.state = in.transport().empty() ? "DETACHED" : "ATTACHED";
  return out;
}

ConfigureProgress ReadProgress(const proto::ConfigureProgress& in) {
  ConfigureProgress out;
  out.state = StateName(in.state());
  out.phase = in.phase();
  out.bytes_done = in.bytes_done();
  out.bytes_total = in.bytes_total();
  out.current_file = in.current_file();
  out.gb_per_second = in.gb_per_second();
  out.eta_seconds = in.eta_seconds();
  return out;
}

WorkerReady ReadReady(const proto::ConfigureReady& in) {
  WorkerReady out;
  out.build = in.build();
  out.config_digest = in.config_digest();
  out.weights_digest = in.weights_digest();
  out.replicated_digest = in.replicated_digest();
  out.own_slices_digest = in.own_slices_digest();
  out.warm = in.warm();
  out.granted = ReadLimits(in.granted(), in.model());
  for (const proto::CostRow& row : in.cost_table()) {
    if (row.kind() == proto::CostRow::DRAFT) continue;  // part of a round's time
    out.costs.push_back({row.kind() == proto::CostRow::PREFILL, static_cast<int>(row.rows()),
                         row.microseconds() / 1000});
  }
  for (const proto::MemoryRow& row : in.memory_plan()) {
    out.memory_bytes.emplace_back(row.name(), row.planned_bytes());
  }
  out.engram = ReadRowService(in.row_service());
  out.load_seconds = in.load_seconds();
  return out;
}

WorkerStatus ReadStatus(const proto::StatusReply& in) {
  WorkerStatus out;
  out.state = StateName(in.state());
  out.epoch = in.epoch();
  out.last_op_id = in.last_op_id();
  out.last_op_age_s = static_cast<double>(in.last_op_age_ms()) / 1000;
  out.slots_used = static_cast<int32_t>(in.slots_in_use());
  out.pages_used = static_cast<int32_t>(in.pages_in_use());
  for (const proto::MemoryRow& row : in.memory()) {
    out.memory_bytes.emplace_back(row.name(), row.used_bytes());
  }
  if (in.resident_bytes() > 0) out.memory_bytes.emplace_back("resident", in.resident_bytes());
  if (in.errors_size() > 0) out.last_error = in.errors(in.errors_size() - 1);
  out.weights_digest = in.weights_digest();
  out.host = in.process().host();
  out.build_id = in.process().build();
  out.engram = ReadRowService(in.row_service());
  if (in.has_progress() && in.progress().bytes_total() > 0) {
    out.phase = absl::StrCat(in.progress().phase(), " ", in.progress().current_file());
    out.progress = static_cast<double>(in.progress().bytes_done()) /
                   static_cast<double>(in.progress().bytes_total());
  }
  return out;
}

}  // namespace

struct WorkerClient::Impl {
  Impl(const std::string& endpoint, CompletionLoop& loop)
      : completions(loop),
        channel(MakeChannel(endpoint)),
        stub(proto::ShardWorker::NewStub(channel)) {}

  void SetDeadline(grpc::ClientContext& context, int64_t deadline_ms) {
    context.set_deadline(std::chrono::system_clock::now() +
                         std::chrono::milliseconds(deadline_ms * limits::kTimeScale));
  }

  CompletionLoop& completions;
  std::shared_ptr<grpc::Channel> channel;
  std::unique_ptr<proto::ShardWorker::Stub> stub;
  std::mutex mutex;
  std::set<grpc::ClientContext*> running;  // what Cancel cancels

  class StatusCall;
};

namespace {

// Registers a context for Cancel as long as the call runs.
class Running {
 public:
  Running(std::mutex& mutex, std::set<grpc::ClientContext*>& running, grpc::ClientContext* context)
      : mutex_(mutex), running_(running), context_(context) {
    std::lock_guard lock(mutex_);
    running_.insert(context_);
  }
  ~Running() {
    std::lock_guard lock(mutex_);
    running_.erase(context_);
  }
  Running(const Running&) = delete;
  Running& operator=(const Running&) = delete;

 private:
  std::mutex& mutex_;
  std::set<grpc::ClientContext*>& running_;
  grpc::ClientContext* const context_;
};

}  // namespace

// A poll, alive until its answer has come.
class WorkerClient::Impl::StatusCall : public Completion {
 public:
  using Callback = std::function<void(absl::StatusOr<WorkerStatus>)>;

  StatusCall(std::shared_ptr<Impl> impl, int64_t deadline_ms, Callback on_status)
      : impl_(std::move(impl)),
        running_(impl_->mutex, impl_->running, &context_),
        on_status_(std::move(on_status)) {
    impl_->SetDeadline(context_, deadline_ms);
  }

  void Start() {
    reader_ =
        impl_->stub->AsyncStatus(&context_, proto::StatusRequest(), &impl_->completions.queue());
    reader_->Finish(&reply_, &status_, impl_->completions.Started(this));
  }

  void OnComplete(bool /*ok*/) override {
    const std::unique_ptr<StatusCall> self(this);
    if (status_.ok()) {
      on_status_(ReadStatus(reply_));
    } else {
      on_status_(FromGrpcStatus(status_));
    }
  }

 private:
  const std::shared_ptr<Impl> impl_;
  grpc::ClientContext context_;
  const Running running_;
  const Callback on_status_;
  std::unique_ptr<grpc::ClientAsyncResponseReader<proto::StatusReply>> reader_;
  proto::StatusReply reply_;
  grpc::Status status_;
};

WorkerClient::WorkerClient(int rank, const std::string& endpoint, CompletionLoop& completions)
    : rank_(rank), endpoint_(endpoint), impl_(std::make_shared<Impl>(endpoint, completions)) {}

WorkerClient::~WorkerClient() {
  Cancel();
}

void WorkerClient::Cancel() {
  std::lock_guard lock(impl_->mutex);
  for (grpc::ClientContext* context : impl_->running)
    context->TryCancel();
}

absl::StatusOr<WorkerHello> WorkerClient::Hello(int64_t deadline_ms) {
  grpc::ClientContext context;
  impl_->SetDeadline(context, deadline_ms);
  const Running running(impl_->mutex, impl_->running, &context);
  proto::HelloRequest request;
  request.set_build(BuildId());
  request.set_protocol_version(kProtocolVersion);
  proto::HelloReply reply;
  const grpc::Status status = impl_->stub->Hello(&context, request, &reply);
  if (!status.ok()) return FromGrpcStatus(status);

  WorkerHello hello;
  hello.build = reply.process().build();
  hello.protocol_version = reply.process().protocol_version();
  hello.host = reply.process().host();
  hello.backend = reply.backend();
  hello.simd_targets.assign(reply.simd_targets().begin(), reply.simd_targets().end());
  hello.device_name = reply.device_name();
  hello.state = StateName(reply.state());
  hello.weights_digest = reply.weights_digest();
  return hello;
}

absl::StatusOr<std::string> WorkerClient::PrepareGroup(uint64_t epoch,
                                                       int world,
                                                       int64_t deadline_ms) {
  grpc::ClientContext context;
  impl_->SetDeadline(context, deadline_ms);
  const Running running(impl_->mutex, impl_->running, &context);
  proto::PrepareGroupRequest request;
  request.set_epoch(epoch);
  request.set_rank(static_cast<uint32_t>(rank_));
  request.set_world(static_cast<uint32_t>(world));
  proto::PrepareGroupReply reply;
  const grpc::Status status = impl_->stub->PrepareGroup(&context, request, &reply);
  if (!status.ok()) return FromGrpcStatus(status);
  return reply.endpoint();
}

absl::StatusOr<WorkerReady> WorkerClient::Configure(
    const GroupConfig& config, const std::function<void(const ConfigureProgress&)>& on_progress) {
  proto::ConfigureRequest request;
  request.set_epoch(config.epoch);
  request.set_rank(static_cast<uint32_t>(rank_));
  request.set_world(static_cast<uint32_t>(config.world));
  for (const std::string& endpoint : config.group_endpoints) {
    request.add_group_endpoints(endpoint);
  }
  request.set_group_secret(config.group_secret);
  request.set_model_dir(config.model_dir);
  request.set_engram_dir(config.engram_dir);
  request.set_expected_config_digest(config.expected_config_digest);
  request.set_expected_weights_digest(config.expected_weights_digest);
  request.set_simd_target(config.simd_target);
  FillLimits(config.wanted, *request.mutable_limits());
  request.set_reload_weights(config.reload_weights);
  request.set_engram_endpoint(config.engram_endpoints.at(static_cast<size_t>(rank_)));
  request.set_heartbeat_interval_ms(limits::kHeartbeatPeriodMs);
  request.set_gateway_silence_ms(static_cast<uint32_t>(config.gateway_silence_ms));

  grpc::ClientContext context;
  const Running running(impl_->mutex, impl_->running, &context);
  auto reader = impl_->stub->Configure(&context, request);
  proto::ConfigureEvent event;
  // A call that is called off as the worker ends it may end well, and without its last message.
  absl::StatusOr<WorkerReady> ready =
      absl::CancelledError("Configure ended without its last message");
  while (reader->Read(&event)) {
    if (event.has_progress()) on_progress(ReadProgress(event.progress()));
    if (event.has_ready()) ready = ReadReady(event.ready());
  }
  const grpc::Status status = reader->Finish();
  if (!status.ok()) return FromGrpcStatus(status);
  return ready;
}

std::unique_ptr<StepStream> WorkerClient::OpenSteps(uint64_t epoch,
                                                    const std::string& config_digest,
                                                    const std::string& weights_digest,
                                                    StepStreamEvents* events) {
  proto::GatewayMessage message;
  proto::OpenSteps* open = message.mutable_open();
  open->set_epoch(epoch);
  open->set_config_digest(config_digest);
  open->set_weights_digest(weights_digest);
  return std::make_unique<GrpcStepStream>(rank_, *impl_->stub, impl_->completions,
                                          std::move(message), events);
}

void WorkerClient::PollStatus(int64_t deadline_ms,
                              std::function<void(absl::StatusOr<WorkerStatus>)> on_status) {
  // Deletes itself.
  (new Impl::StatusCall(impl_, deadline_ms, std::move(on_status)))->Start();
}

}  // namespace twinspark::gateway
