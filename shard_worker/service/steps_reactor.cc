// See steps_reactor.h.
#include "shard_worker/service/steps_reactor.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "common/limits.h"
#include "common/log.h"
#include "common/rpc/grpc_status.h"
#include "shard_worker/service/op_reader.h"
#include "shard_worker/service/result_writer.h"

namespace twinspark {
namespace {

// Results of the ops in flight and heartbeats; more means that the gateway does not read.
constexpr size_t kMaxQueuedMessages = 64;

// For the results and the reason of an end to leave.
constexpr std::chrono::milliseconds kLastWordsLimit{500};

class StepsReactor final
    : public grpc::ServerBidiReactor<proto::GatewayMessage, proto::WorkerMessage>,
      public StepsSink {
 public:
  StepsReactor(WorkerCore& core, grpc::CallbackServerContext* context)
      : core_(core), context_(context) {
    StartRead(&incoming_);
  }

  // ---- gRPC's threads

  void OnReadDone(bool ok) override {
    if (!ok) {
      OnStreamClosed();
      return;
    }
    EpochRunner* const runner = runner_.load();
    if (runner == nullptr) {
      if (Open()) StartRead(&incoming_);
      return;
    }
    switch (incoming_.message_case()) {
      case proto::GatewayMessage::kOp:
        runner->Submit(ReadOp(std::move(*incoming_.mutable_op()), bounds_));
        if (HoldRead()) return;
        break;
      case proto::GatewayMessage::kHeartbeat:
        runner->GatewayHeard();
        break;
      default:
        runner->End(absl::InvalidArgumentError(
            "Steps: a message that is neither an op nor a heartbeat came after the first one"));
    }
    if (!runner->ending()) StartRead(&incoming_);
  }

  void OnWriteDone(bool ok) override {
    if (!ok) EndEpoch("the stream to the gateway broke while writing");
    const std::lock_guard<std::mutex> lock(mutex_);
    outgoing_.pop_front();
    if (!ok) outgoing_.clear();
    if (outgoing_.empty()) {
      drained_.notify_all();
    } else {
      StartWrite(&outgoing_.front());
    }
  }

  void OnCancel() override {
    cancelled_.store(true);
    EndEpoch("the stream to the gateway was lost");
  }

  void OnDone() override { delete this; }

  // ---- the epoch's sender thread

  void SendResult(const OpOutcome& outcome) override {
    proto::WorkerMessage message;
    WriteOpResult(outcome, rank_ == 0, message.mutable_result());
    Send(std::move(message));
    ReadOn(/*num_answered=*/1);
  }

  void SendHeartbeat(const Heartbeat& heartbeat) override {
    proto::WorkerMessage message;
    WriteHeartbeat(heartbeat, message.mutable_heartbeat());
    Send(std::move(message));
    ReadOn(/*num_answered=*/0);
  }

  void Finish(const absl::Status& reason) override {
    {
      std::unique_lock<std::mutex> lock(mutex_);
      const auto drained = [this] { return outgoing_.empty(); };
      if (!drained_.wait_for(lock, kLastWordsLimit, drained)) {
        // A gateway that does not read keeps the write in flight for ever: break it off.
        context_->TryCancel();
        drained_.wait(lock, drained);
      }
    }
    ServerBidiReactor::Finish(ToGrpcStatus(reason));  // `this` may be gone from here on
  }

 private:
  // The first message. False when the stream was refused.
  bool Open() {
    if (incoming_.message_case() != proto::GatewayMessage::kOpen) {
      Finish(absl::InvalidArgumentError("Steps: the first message must be OpenSteps"));
      return false;
    }
    const proto::OpenSteps& open = incoming_.open();
    absl::StatusOr<OpenedSteps> opened =
        core_.OpenSteps({open.epoch(), open.config_digest(), open.weights_digest()});
    if (!opened.ok()) {
      LOG_WARNING << "steps refused epoch=" << open.epoch() << " reason=\"" << opened.status()
                  << "\"";
      Finish(opened.status());
      return false;
    }
    rank_ = opened->rank;
    bounds_ = {opened->granted, opened->model.vocab_size, opened->model.max_drafts};
    proto::WorkerMessage message;
    message.mutable_accepted()->set_epoch(opened->epoch);
    message.mutable_accepted()->set_rank(static_cast<uint32_t>(rank_));
    Send(std::move(message));
    owned_runner_ = std::move(opened->runner);
    runner_.store(owned_runner_.get());
    if (cancelled_.load()) EndEpoch("the stream to the gateway was lost");
    owned_runner_->Start(*this);
    return true;
  }

  void OnStreamClosed() {
    EpochRunner* const runner = runner_.load();
    if (runner == nullptr) {
      Finish(absl::CancelledError("Steps: closed before the first message"));
    } else if (context_->IsCancelled()) {
      EndEpoch("the stream to the gateway was lost");
    } else {
      runner->End(absl::OkStatus());  // a half-close is the regular end
    }
  }

  void EndEpoch(const char* reason) {
    EpochRunner* const runner = runner_.load();
    if (runner != nullptr) runner->End(absl::UnavailableError(reason));
  }

  // With two ops here no third comes before a result has left. Read on with that result (or the
  // next heartbeat), the stream acknowledges the op in the packet of the result; read on at once,
  // it does so in a packet of its own, which wakes the gateway for nothing. Called when the op has
  // been handed on: from here another thread may read the next one, and ops have one producer at a
  // time. Its result may have left already, so the count may be behind by one.
  bool HoldRead() {
    const std::lock_guard<std::mutex> lock(mutex_);
    read_is_held_ = ++num_unanswered_ >= limits::kMaxOpsInFlight;
    return read_is_held_;
  }

  void ReadOn(int num_answered) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      num_unanswered_ -= num_answered;
      if (!std::exchange(read_is_held_, false)) return;
    }
    if (!runner_.load()->ending()) StartRead(&incoming_);
  }

  void Send(proto::WorkerMessage message) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (outgoing_.size() < kMaxQueuedMessages) {
        outgoing_.push_back(std::move(message));
        if (outgoing_.size() == 1) StartWrite(&outgoing_.front());
        return;
      }
    }
    EndEpoch("the gateway leaves the messages of the stream unread");
  }

  WorkerCore& core_;
  grpc::CallbackServerContext* const context_;
  proto::GatewayMessage incoming_;
  std::shared_ptr<EpochRunner> owned_runner_;
  std::atomic<EpochRunner*> runner_{nullptr};  // owned_runner_, published by the first read
  OpBounds bounds_;
  int rank_ = 0;
  std::atomic<bool> cancelled_{false};

  std::mutex mutex_;
  std::deque<proto::WorkerMessage> outgoing_;  // front: being written
  std::condition_variable drained_;            // outgoing_ became empty
  int num_unanswered_ = 0;                     // ops handed on less results sent
  bool read_is_held_ = false;
};

}  // namespace

grpc::ServerBidiReactor<proto::GatewayMessage, proto::WorkerMessage>* NewStepsReactor(
    WorkerCore& core, grpc::CallbackServerContext* context) {
  return new StepsReactor(core, context);
}

}  // namespace twinspark
