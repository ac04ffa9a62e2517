// Two threads that prepare large requests (reading JSON, encoding megabytes of text), so that the
// connections' executors stay free for streams. Of those that wait the smallest goes first, and one
// of the threads takes nothing large at all, so that a body of megabytes never holds up an ordinary
// long prompt. Bounded in tasks and in bytes. Made by OpenAiApi.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <thread>

#include "absl/base/thread_annotations.h"

namespace twinspark::gateway {

// Thread-safe. The destructor drops what has not begun and waits for the rest.
class PrepareWorker {
 public:
  struct Task {
    size_t num_bytes = 0;  // of the request that it holds
    // Set when the client has gone: the task is dropped if it has not begun. May be null.
    std::shared_ptr<const std::atomic<bool>> is_gone;
    std::function<void()> run;
  };

  static constexpr size_t kMaxSmallBytes = size_t{1} << 20;  // what the second thread takes
  // Every so many tasks the one that waits longest goes first.
  static constexpr uint64_t kOldestFirstEvery = 4;

  explicit PrepareWorker(size_t max_bytes);
  ~PrepareWorker();

  // False when it does not fit into the queue.
  bool Run(Task task);

 private:
  void Loop(size_t max_task_bytes);
  // The next task of a thread that takes at most so many bytes; end() when there is none.
  std::list<Task>::iterator Next(size_t max_task_bytes) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropGone() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const size_t max_bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Task> queue_ ABSL_GUARDED_BY(mutex_);  // in order of arrival
  size_t num_bytes_ ABSL_GUARDED_BY(mutex_) = 0;   // queued and running
  uint64_t num_taken_ ABSL_GUARDED_BY(mutex_) = 0;
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;
  std::array<std::thread, 2> threads_;
};

}  // namespace twinspark::gateway
