#include "gateway/engine/testing/fake_worker.h"

#include <chrono>
#include <condition_variable>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"

#include "common/build_info.h"
#include "common/check.h"
#include "common/ids.h"
#include "common/limits.h"
#include "common/rpc/grpc_server.h"
#include "proto/shard_worker.grpc.pb.h"

namespace twinspark::gateway {
namespace {

constexpr uint32_t kFakeProtocolVersion = 1;
constexpr int64_t kPollMs = 2;

std::vector<int32_t> ReadIds(const google::protobuf::RepeatedField<uint32_t>& ids) {
  return {ids.begin(), ids.end()};
}

OpenSequence ReadOpen(const proto::OpenSequence& in) {
  OpenSequence open;
  open.slot = static_cast<int>(in.slot());
  open.ids = ReadIds(in.prompt_ids());
  open.num_prompt_ids = static_cast<int32_t>(in.num_prompt_ids());
  SamplingParams sampling;
  sampling.seed = in.sampling().seed();
  open.wants_prompt_logprobs = in.has_prompt_logprobs();
  if (in.has_prompt_logprobs()) {
    sampling.num_prompt_logprobs = static_cast<int32_t>(in.prompt_logprobs());
  }
  open.sampling = std::make_shared<const SamplingParams>(sampling);
  open.draft_allowed = in.draft_allowed();
  return open;
}

SetMask ReadMask(const proto::SetMask& in) {
  SetMask mask;
  mask.mask_id = in.mask_id();
  for (size_t id = 0; id < 8 * in.packed().size(); ++id) {
    if ((in.packed()[id / 8] >> (id % 8)) & 1) {
      mask.allowed_token_ids.push_back(static_cast<int32_t>(id));
    }
  }
  return mask;
}

PrefillRange ReadRange(
    uint32_t slot, uint32_t first, uint32_t end, bool draft_next, uint32_t mask_id) {
  PrefillRange range;
  range.slot = static_cast<int>(slot);
  range.begin = static_cast<int32_t>(first);
  range.end = static_cast<int32_t>(end);
  range.draft_next = draft_next;
  range.mask_id = mask_id;
  return range;
}

void AddControl(const proto::Control& in, StepPlan& plan) {
  if (in.has_close_sequence()) {
    plan.controls.push_back(CloseSequence{static_cast<int>(in.close_sequence().slot())});
  } else if (in.has_open_sequence() && in.open_sequence().ids_offset() == 0) {
    plan.controls.push_back(ReadOpen(in.open_sequence()));
  } else if (in.has_open_sequence()) {
    auto& open = std::get<OpenSequence>(plan.controls.back());
    const std::vector<int32_t> more = ReadIds(in.open_sequence().prompt_ids());
    CHECK_EQ(open.ids.size(), in.open_sequence().ids_offset());
    open.ids.insert(open.ids.end(), more.begin(), more.end());
  } else if (in.has_set_mask()) {
    plan.controls.push_back(ReadMask(in.set_mask()));
  } else if (in.has_map_pages()) {
    MapPages map;
    map.slot = static_cast<int>(in.map_pages().slot());
    for (const auto& page : in.map_pages().pages()) {
      map.pages.push_back(
          {static_cast<int32_t>(page.logical_page()), static_cast<int32_t>(page.physical_page())});
    }
    plan.controls.push_back(std::move(map));
  } else {
    CHECK(false) << "a control that the gateway does not send: " << in.ShortDebugString();
  }
}

StepPlan ReadPlan(const proto::Op& op) {
  StepPlan plan;
  plan.op_id = op.op_id();
  for (const proto::Control& control : op.controls())
    AddControl(control, plan);
  for (const proto::RoundSequence& in : op.compute().round().sequences()) {
    RoundSequence round;
    round.slot = static_cast<int>(in.slot());
    round.first_position = static_cast<int32_t>(in.first_position());
    round.after_previous = in.after_previous();
    round.k = static_cast<int>(in.k());
    round.draft_next = in.draft_next();
    if (in.mask_ids_size() > 0) round.mask_id = in.mask_ids(0);
    plan.round.push_back(round);
  }
  for (const proto::PrefillSequence& in : op.compute().short_prefill().sequences()) {
    plan.short_prefill.push_back(ReadRange(in.slot(), in.first_position(), in.end_position(),
                                           in.draft_next(), in.mask_id()));
  }
  if (op.compute().has_chunk_slice()) {
    const proto::ChunkSlice& in = op.compute().chunk_slice();
    plan.chunk = ChunkSlice{in.chunk_id(), static_cast<int>(in.end_layer()),
                            ReadRange(in.slot(), in.first_position(), in.end_position(),
                                      in.draft_next(), in.mask_id())};
  }
  return plan;
}

void WriteSequence(const SequenceResult& in, proto::SequenceResult& out) {
  out.set_slot(static_cast<uint32_t>(in.slot));
  out.set_num_accepted(static_cast<uint32_t>(in.num_accepted));
  for (const int32_t token : in.tokens)
    out.add_tokens(static_cast<uint32_t>(token));
  for (int j = 0; j < in.num_drafts; ++j)
    out.add_draft_ids(0);
  for (const TokenLogprobs& entry : in.prompt_logprobs) {
    proto::TokenLogprobs* to = out.add_prompt_logprobs();
    to->set_logprob(entry.logprob);
    to->set_rank(static_cast<uint32_t>(entry.rank));
    for (const TokenLogprob& top : entry.top) {
      to->add_top_ids(static_cast<uint32_t>(top.token_id));
      to->add_top_logprobs(top.logprob);
    }
  }
}

}  // namespace

class FakeWorker::Service final : public proto::ShardWorker::Service {
 public:
  explicit Service(const FakeWorkerConfig& config) : config_(config) {}

  grpc::Status Hello(grpc::ServerContext*,
                     const proto::HelloRequest*,
                     proto::HelloReply* reply) override {
    WaitWhileFrozen();
    reply->mutable_process()->set_build(config_.build.empty() ? BuildId() : config_.build);
    reply->mutable_process()->set_protocol_version(kFakeProtocolVersion);
    reply->mutable_process()->set_host("fake");
    reply->set_backend("cpu");
    reply->add_simd_targets("SCALAR");
    reply->set_state(State());
    return grpc::Status::OK;
  }

  grpc::Status PrepareGroup(grpc::ServerContext*,
                            const proto::PrepareGroupRequest* request,
                            proto::PrepareGroupReply* reply) override {
    std::lock_guard lock(mutex_);
    if (serving_) return {grpc::StatusCode::FAILED_PRECONDITION, "still serving"};
    if (request->epoch() <= epoch_) {
      return {grpc::StatusCode::FAILED_PRECONDITION, "an old epoch"};
    }
    reply->set_endpoint(absl::StrCat("fake:", request->rank()));
    return grpc::Status::OK;
  }

  grpc::Status Configure(grpc::ServerContext*,
                         const proto::ConfigureRequest* request,
                         grpc::ServerWriter<proto::ConfigureEvent>* writer) override {
    std::lock_guard lock(mutex_);
    ++num_configures_;
    if (!refusal_.empty()) return {grpc::StatusCode::UNAVAILABLE, refusal_};
    epoch_ = request->epoch();
    rank_ = static_cast<int>(request->rank());
    proto::ConfigureEvent event;
    event.mutable_progress()->set_state(proto::WORKER_LOADING);
    event.mutable_progress()->set_bytes_done(1);
    event.mutable_progress()->set_bytes_total(2);
    writer->Write(event);
    proto::ConfigureReady* ready = event.mutable_ready();
    ready->set_config_digest("00000000000000cc");
    ready->set_weights_digest(config_.weights_digest);
    ready->set_own_slices_digest(config_.own_slices_digest);
    ready->mutable_row_service()->set_transport("shm");
    ready->mutable_model()->set_max_drafts(static_cast<uint32_t>(config_.limits.max_drafts));
    ready->mutable_model()->set_num_layers(4);
    ready->mutable_model()->set_vocab_size(static_cast<uint32_t>(config_.language.vocab_size));
    proto::Limits* granted = ready->mutable_granted();
    granted->set_num_slots(static_cast<uint32_t>(config_.limits.num_slots));
    granted->set_num_pages(static_cast<uint32_t>(config_.limits.num_pages));
    granted->set_max_round_rows(static_cast<uint32_t>(config_.limits.max_round_rows));
    granted->set_max_short_prefill_rows(
        static_cast<uint32_t>(config_.limits.max_short_prefill_rows));
    granted->set_max_chunk_rows(static_cast<uint32_t>(config_.limits.max_chunk_rows));
    granted->set_max_context(static_cast<uint32_t>(config_.limits.max_context));
    writer->Write(event);
    return grpc::Status::OK;
  }

  grpc::Status Steps(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<proto::WorkerMessage, proto::GatewayMessage>* stream) override {
    proto::GatewayMessage incoming;
    if (!stream->Read(&incoming) || !incoming.has_open()) {
      return {grpc::StatusCode::INVALID_ARGUMENT, "the first message opens an epoch"};
    }
    {
      std::lock_guard lock(mutex_);
      if (incoming.open().epoch() != epoch_) {
        return {grpc::StatusCode::FAILED_PRECONDITION, "another epoch"};
      }
      worker_ = std::make_unique<ToyWorker>(config_.language, config_.limits);
      worker_->is_unbuilt = [most = config_.max_prompt_logprobs](const OpenSequence& open) {
        return open.wants_prompt_logprobs && open.sampling->num_prompt_logprobs > most;
      };
      serving_ = true;
    }
    std::mutex write_mutex;
    proto::WorkerMessage accepted;
    accepted.mutable_accepted()->set_epoch(incoming.open().epoch());
    stream->Write(accepted);
    std::atomic<bool> over{false};
    std::thread heartbeats([&] {
      while (!over) {
        if (!frozen_) {
          proto::WorkerMessage message;
          message.mutable_heartbeat()->set_state(proto::WORKER_SERVING);
          std::lock_guard lock(write_mutex);
          stream->Write(message);
        }
        for (int i = 0; i < 25 && !over; ++i)
          Pause();
      }
    });
    while (stream->Read(&incoming)) {
      if (!incoming.has_op()) continue;
      proto::WorkerMessage outgoing;
      RunOp(incoming.op(), *outgoing.mutable_result());
      while ((frozen_ || stuck_) && !context->IsCancelled() && !dead_)
        Pause();
      std::lock_guard lock(write_mutex);
      stream->Write(outgoing);
    }
    over = true;
    heartbeats.join();
    std::lock_guard lock(mutex_);
    serving_ = false;
    worker_.reset();
    return grpc::Status::OK;
  }

  grpc::Status Status(grpc::ServerContext*,
                      const proto::StatusRequest*,
                      proto::StatusReply* reply) override {
    WaitWhileFrozen();
    reply->set_state(State());
    std::lock_guard lock(mutex_);
    reply->set_epoch(epoch_);
    reply->set_last_op_id(num_ops_);
    reply->mutable_row_service()->set_transport("shm");
    if (worker_ == nullptr) return grpc::Status::OK;
    reply->set_slots_in_use(static_cast<uint32_t>(worker_->slots_in_use()));
    reply->set_pages_in_use(static_cast<uint32_t>(worker_->pages_in_use()));
    return grpc::Status::OK;
  }

  void RunOp(const std::string& bytes, proto::OpResult& out) {
    proto::Op op;
    CHECK(op.ParseFromString(bytes));
    if (config_.op_delay_us > 0) {
      std::this_thread::sleep_for(std::chrono::microseconds(config_.op_delay_us));
    }
    std::lock_guard lock(mutex_);
    ++num_ops_;
    out.set_op_id(op.op_id());
    const auto result = worker_->Run(ReadPlan(op));
    if (!result.ok() || fail_in_ == 0) {
      const absl::Status& status = result.ok() ? failure_ : result.status();
      out.mutable_status()->set_code(static_cast<uint32_t>(status.code()));
      out.mutable_status()->set_message(std::string(status.message()));
      fail_in_ = -1;
      return;
    }
    for (const auto& sequence : result->round)
      WriteSequence(sequence, *out.add_round());
    for (const auto& sequence : result->short_prefill) {
      WriteSequence(sequence, *out.add_short_prefill());
    }
    if (result->chunk) WriteSequence(*result->chunk, *out.mutable_chunk_slice());
    out.mutable_timings()->set_total_us(
        static_cast<uint32_t>(std::max<int64_t>(config_.op_delay_us, 1)));
    out.set_digest(Hash64(absl::StrCat(bytes, out.SerializeAsString())));
    if (diverge_in_ == 0) out.set_digest(out.digest() ^ 1);
    if (rank_ != 0) {
      out.clear_round();
      out.clear_short_prefill();
      out.clear_chunk_slice();
    }
    diverge_in_ = std::max(diverge_in_ - 1, -1);
    fail_in_ = std::max(fail_in_ - 1, -1);
  }

  proto::WorkerState State() {
    std::lock_guard lock(mutex_);
    return serving_ ? proto::WORKER_SERVING : proto::WORKER_IDLE;
  }

  void WaitWhileFrozen() {
    while (frozen_ && !dead_)
      Pause();
  }
  static void Pause() { std::this_thread::sleep_for(std::chrono::milliseconds(kPollMs)); }

  FakeWorkerConfig config_;
  std::atomic<bool> frozen_{false};
  std::atomic<bool> stuck_{false};
  std::atomic<bool> dead_{false};
  std::mutex mutex_;
  std::unique_ptr<ToyWorker> worker_;
  std::string refusal_;
  uint64_t epoch_ = 0;
  int rank_ = 0;
  bool serving_ = false;
  uint64_t num_ops_ = 0;
  uint64_t num_configures_ = 0;
  int diverge_in_ = -1;
  int fail_in_ = -1;
  absl::Status failure_;
};

FakeWorker::FakeWorker(const FakeWorkerConfig& config)
    : service_(std::make_unique<Service>(config)) {
  auto server = GrpcServer::Start(config.address, {service_.get()});
  CHECK(server.ok()) << server.status().ToString();
  server_ = *std::move(server);
}

FakeWorker::~FakeWorker() {
  Die();
}

const std::string& FakeWorker::address() const {
  return server_->address();
}

void FakeWorker::Freeze(bool frozen) {
  service_->frozen_ = frozen;
}

void FakeWorker::StickOps(bool stuck) {
  service_->stuck_ = stuck;
}

void FakeWorker::DivergeAt(int ops_from_now) {
  std::lock_guard lock(service_->mutex_);
  service_->diverge_in_ = ops_from_now;
}

void FakeWorker::FailAt(int ops_from_now, const absl::Status& status) {
  std::lock_guard lock(service_->mutex_);
  service_->fail_in_ = ops_from_now;
  service_->failure_ = status;
}

void FakeWorker::RefuseConfigure(const std::string& reason) {
  std::lock_guard lock(service_->mutex_);
  service_->refusal_ = reason;
}

void FakeWorker::ChangeSlices(const std::string& digest) {
  std::lock_guard lock(service_->mutex_);
  service_->config_.own_slices_digest = digest;
}

void FakeWorker::Die() {
  service_->dead_ = true;
  server_->Shutdown(std::chrono::milliseconds(0));
}

uint64_t FakeWorker::num_ops() const {
  std::lock_guard lock(service_->mutex_);
  return service_->num_ops_;
}

uint64_t FakeWorker::num_configures() const {
  std::lock_guard lock(service_->mutex_);
  return service_->num_configures_;
}

int FakeWorker::slots_in_use() const {
  std::lock_guard lock(service_->mutex_);
  return service_->worker_ == nullptr ? 0 : service_->worker_->slots_in_use();
}

int FakeWorker::pages_in_use() const {
  std::lock_guard lock(service_->mutex_);
  return service_->worker_ == nullptr ? 0 : service_->worker_->pages_in_use();
}

bool FakeWorker::is_serving() const {
  std::lock_guard lock(service_->mutex_);
  return service_->serving_;
}

}  // namespace twinspark::gateway
