#include "gateway/engine/completion_loop.h"

#include <grpc/support/time.h>
#include <grpcpp/alarm.h>
#include <grpcpp/completion_queue.h>

namespace twinspark::gateway {
namespace {

constexpr int64_t kLastCompletionsUs = 100'000;

gpr_timespec After(int64_t timeout_us) {
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_micros(timeout_us, GPR_TIMESPAN));
}

}  // namespace

struct CompletionLoop::Impl {
  grpc::CompletionQueue queue;
  grpc::Alarm alarm;
};

CompletionLoop::CompletionLoop() : impl_(std::make_unique<Impl>()) {}

CompletionLoop::~CompletionLoop() {
  // A completion may start the next one (the status of a stream that was cancelled), which a queue
  // that is shut down does not take.
  while (num_pending_.load() > 0 || wake_pending_.load())
    RunOne(kLastCompletionsUs);
  impl_->queue.Shutdown();
  void* tag = nullptr;
  bool ok = false;
  while (impl_->queue.Next(&tag, &ok)) {
  }
}

bool CompletionLoop::RunOne(int64_t timeout_us) {
  void* tag = nullptr;
  bool ok = false;
  if (impl_->queue.AsyncNext(&tag, &ok, After(timeout_us)) != grpc::CompletionQueue::GOT_EVENT) {
    return false;
  }
  if (tag == nullptr) {
    wake_pending_.store(false);
    return false;
  }
  static_cast<Completion*>(tag)->OnComplete(ok);
  num_pending_.fetch_sub(1);
  return true;
}

void CompletionLoop::Wake() {
  // An alarm is set again only after its last ring was heard.
  if (wake_pending_.exchange(true)) return;
  impl_->alarm.Set(&impl_->queue, gpr_time_0(GPR_CLOCK_MONOTONIC), nullptr);
}

Completion* CompletionLoop::Started(Completion* completion) {
  num_pending_.fetch_add(1);
  return completion;
}

grpc::CompletionQueue& CompletionLoop::queue() {
  return impl_->queue;
}

}  // namespace twinspark::gateway
