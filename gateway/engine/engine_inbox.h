// What the engine thread is told: requests from the API, results and losses from the workers, new
// epochs. The engine thread waits in the completion loop, which hands it the workers' messages
// itself; what other threads push wakes it. Bounded by its senders: submissions by
// EngineLoop::Submit, results by the ops in flight, the rest by one per request or epoch.
// Thread-safe; Take belongs to one thread.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <variant>
#include <vector>

#include "gateway/engine/completion_loop.h"
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

// The engine thread reads at least every 100 ms. Later than this the gateway lacks a processor, and
// the time is not counted against the workers.
inline constexpr int64_t kReadLateUs = 200'000;

class EngineInbox {
 public:
  explicit EngineInbox(CompletionLoop& completions) : completions_(completions) {}

  void Push(EngineMessage message) {
    {
      std::lock_guard lock(mutex_);
      messages_.push_back(std::move(message));
    }
    if (std::this_thread::get_id() != taker_.load()) completions_.Wake();
  }

  // Since the taker last looked at its streams. More than the time-out of its Takes: it did not get
  // to run, and what the workers sent lies unread.
  int64_t UnreadUs() const {
    return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now() -
                                                                 turned_at_.load())
        .count();
  }

  // Ends a Take that waits, without a message.
  void Wake() { completions_.Wake(); }

  // All messages, in order; waits at most `timeout_us` for the first.
  std::vector<EngineMessage> Take(int64_t timeout_us) {
    taker_.store(std::this_thread::get_id());
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(timeout_us);
    while (true) {
      {
        std::lock_guard lock(mutex_);
        if (!messages_.empty()) return std::exchange(messages_, {});
      }
      const auto now = std::chrono::steady_clock::now();
      turned_at_.store(now);
      const int64_t left_us =
          std::chrono::duration_cast<std::chrono::microseconds>(end - now).count();
      if (completions_.RunOne(std::max(left_us, int64_t{0}))) continue;
      std::lock_guard lock(mutex_);
      return std::exchange(messages_, {});
    }
  }

 private:
  CompletionLoop& completions_;
  std::atomic<std::thread::id> taker_{};
  std::atomic<std::chrono::steady_clock::time_point> turned_at_{};
  std::mutex mutex_;
  std::vector<EngineMessage> messages_;
};

}  // namespace twinspark::gateway
