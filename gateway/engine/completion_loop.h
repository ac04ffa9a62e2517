// What the engine thread waits in: the gRPC completion queue of the workers' step streams and
// Status polls. A worker's message is read on the thread that acts on it, so that a round costs one
// wake-up per rank and no hop between threads. While no other thread of the process waits in gRPC
// (none does outside of setting an epoch up), nobody else is woken either.
//
// RunOne belongs to one thread; Wake and the starts of calls to any. Destroyed after everything
// that starts calls; it then handles what still comes, until every call is over.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace grpc {
class CompletionQueue;
}

namespace twinspark::gateway {

class CompletionLoop;

// A tag of the queue: something that was started on it and comes back once.
class Completion {
 public:
  virtual ~Completion() = default;
  // On the thread of RunOne. `this` may be destroyed by it.
  virtual void OnComplete(bool ok) = 0;
};

class CompletionLoop {
 public:
  CompletionLoop();
  ~CompletionLoop();
  CompletionLoop(const CompletionLoop&) = delete;
  CompletionLoop& operator=(const CompletionLoop&) = delete;

  // Handles one completion, waiting at most `timeout_us` for it. False when none came.
  bool RunOne(int64_t timeout_us);

  // Ends a RunOne that waits, or the next one, without a completion.
  void Wake();

  // Counts a start: `completion` will come back. To be called just before it is given to the queue.
  Completion* Started(Completion* completion);
  grpc::CompletionQueue& queue();

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
  std::atomic<int64_t> num_pending_{0};
  std::atomic<bool> wake_pending_{false};
};

}  // namespace twinspark::gateway
