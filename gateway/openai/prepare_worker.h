// One thread that prepares large requests (reading JSON, encoding megabytes of text), so that the
// connections' executors stay free for streams. Bounded in tasks and in bytes. Made by OpenAiApi.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"

namespace twinspark::gateway {

// Thread-safe. The destructor drops what has not begun and waits for the rest.
class PrepareWorker {
 public:
  explicit PrepareWorker(size_t max_bytes);
  ~PrepareWorker();

  // Runs `task`, which holds `num_bytes` of a request; false when it does not fit into the queue.
  bool Run(size_t num_bytes, std::function<void()> task);

 private:
  void Loop();

  const size_t max_bytes_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::pair<size_t, std::function<void()>>> queue_ ABSL_GUARDED_BY(mutex_);
  size_t num_bytes_ ABSL_GUARDED_BY(mutex_) = 0;  // queued and running
  bool stops_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace twinspark::gateway
