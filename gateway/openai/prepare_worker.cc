#include "gateway/openai/prepare_worker.h"

namespace twinspark::gateway {
namespace {

constexpr size_t kMaxTasks = 256;

}  // namespace

PrepareWorker::PrepareWorker(size_t max_bytes)
    : max_bytes_(max_bytes), thread_([this] { Loop(); }) {}

PrepareWorker::~PrepareWorker() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

bool PrepareWorker::Run(size_t num_bytes, std::function<void()> task) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (queue_.size() >= kMaxTasks || num_bytes_ + num_bytes > max_bytes_) return false;
    num_bytes_ += num_bytes;
    queue_.emplace_back(num_bytes, std::move(task));
  }
  changed_.notify_all();
  return true;
}

void PrepareWorker::Loop() {
  for (;;) {
    std::pair<size_t, std::function<void()>> next;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return stops_ || !queue_.empty(); });
      if (stops_) return;
      next = std::move(queue_.front());
      queue_.pop_front();
    }
    next.second();
    next.second = nullptr;  // gives the request's memory back before the bytes are counted off
    const std::lock_guard<std::mutex> lock(mutex_);
    num_bytes_ -= next.first;
  }
}

}  // namespace twinspark::gateway
