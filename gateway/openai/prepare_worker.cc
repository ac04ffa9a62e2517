#include "gateway/openai/prepare_worker.h"

#include <utility>

namespace twinspark::gateway {
namespace {

constexpr size_t kMaxTasks = 256;

}  // namespace

PrepareWorker::PrepareWorker(size_t max_bytes) : max_bytes_(max_bytes) {
  threads_[0] = std::thread([this] { Loop(SIZE_MAX); });
  threads_[1] = std::thread([this] { Loop(kMaxSmallBytes); });
}

PrepareWorker::~PrepareWorker() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stops_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_)
    thread.join();
}

bool PrepareWorker::Run(Task task) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    DropGone();
    if (queue_.size() >= kMaxTasks || num_bytes_ + task.num_bytes > max_bytes_) return false;
    num_bytes_ += task.num_bytes;
    queue_.push_back(std::move(task));
  }
  changed_.notify_all();
  return true;
}

void PrepareWorker::DropGone() {
  for (auto it = queue_.begin(); it != queue_.end();) {
    if (it->is_gone == nullptr || !it->is_gone->load()) {
      ++it;
      continue;
    }
    num_bytes_ -= it->num_bytes;
    it = queue_.erase(it);
  }
}

std::list<PrepareWorker::Task>::iterator PrepareWorker::Next(size_t max_task_bytes) {
  DropGone();
  const bool takes_oldest = num_taken_ % kOldestFirstEvery == kOldestFirstEvery - 1;
  auto next = queue_.end();
  for (auto it = queue_.begin(); it != queue_.end(); ++it) {
    if (it->num_bytes > max_task_bytes) continue;
    if (next == queue_.end() || it->num_bytes < next->num_bytes) next = it;
    if (takes_oldest) break;
  }
  return next;
}

void PrepareWorker::Loop(size_t max_task_bytes) {
  for (;;) {
    Task task;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      auto next = queue_.end();
      while (!stops_ && (next = Next(max_task_bytes)) == queue_.end())
        changed_.wait(lock);
      if (stops_) return;
      ++num_taken_;
      task = std::move(*next);
      queue_.erase(next);
    }
    task.run();
    task.run = nullptr;  // gives the request's memory back before the bytes are counted off
    const std::lock_guard<std::mutex> lock(mutex_);
    num_bytes_ -= task.num_bytes;
  }
}

}  // namespace twinspark::gateway
