// What other threads tell the engine thread: requests from the API, results and losses from the
// workers, new epochs. A mutex, a queue and a condition variable; the engine thread takes
// everything at once. Bounded by its senders: submissions by EngineLoop::Submit, results by the ops
// in flight, the rest by one per request or epoch. Thread-safe.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "gateway/engine/generate_request.h"
#include "gateway/engine/worker_types.h"

namespace twinspark::gateway {

class WorkerGroup;

struct SubmitMessage {
  GenerateId id = 0;
  GenerateRequest request;
  std::shared_ptr<GenerateEvents> events;
};

struct EndMessage {
  GenerateId id = 0;
  EndReason reason = EndReason::kCancelled;
};

struct ResultMessage {
  uint64_t epoch = 0;
  int rank = 0;
  RankResult result;
};

// A rank of this epoch is lost, silent or wrong: the epoch is over.
struct LostMessage {
  uint64_t epoch = 0;
  std::string cause;  // one word, for the metrics
  std::string reason;
};

struct ReadyMessage {
  std::shared_ptr<WorkerGroup> group;
  EpochLimits limits;
  std::vector<CostEntry> costs;
};

// Ends everything that still runs (the drain time is over).
struct AbortAllMessage {
  absl::Status error;
};

using EngineMessage = std::
    variant<SubmitMessage, EndMessage, ResultMessage, LostMessage, ReadyMessage, AbortAllMessage>;

class EngineInbox {
 public:
  void Push(EngineMessage message) {
    {
      std::lock_guard lock(mutex_);
      messages_.push_back(std::move(message));
    }
    arrived_.notify_one();
  }

  // Ends a Take that waits, without a message.
  void Wake() {
    {
      std::lock_guard lock(mutex_);
      woken_ = true;
    }
    arrived_.notify_one();
  }

  // All messages, in order; waits at most `timeout_us` for the first.
  std::vector<EngineMessage> Take(int64_t timeout_us) {
    std::unique_lock lock(mutex_);
    arrived_.wait_for(lock, std::chrono::microseconds(timeout_us),
                      [this] { return woken_ || !messages_.empty(); });
    woken_ = false;
    return std::exchange(messages_, {});
  }

 private:
  std::mutex mutex_;
  std::condition_variable arrived_;
  std::vector<EngineMessage> messages_;
  bool woken_ = false;
};

}  // namespace twinspark::gateway
