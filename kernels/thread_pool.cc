// See thread_pool.h. Release/acquire pairs: generation_ publishes job_ to the workers, pending_
// publishes their results back.
#include "kernels/thread_pool.h"

#include <algorithm>
#include <chrono>

#include "common/check.h"

namespace twinspark {
namespace {

inline void CpuRelax() {
#if defined(__x86_64__)
  __asm__ __volatile__("pause");
#elif defined(__aarch64__)
  __asm__ __volatile__("yield");
#endif
}

// Spins politely: on a machine with fewer cores than threads the scheduler gets its chance soon,
// and who has waited in vain is told to sleep. A yield that gave the core away for longer than that
// says so by itself: a sleeper that is woken gets its core back sooner than one that yields.
class Spinner {
 public:
  // False when it is time to sleep.
  bool Wait() {
    if (++spins_ < kSpinsBeforeYield) {
      CpuRelax();
      return true;
    }
    const auto now = std::chrono::steady_clock::now();
    if (spins_ == kSpinsBeforeYield) sleep_at_ = now + kYieldTime;
    if (now >= sleep_at_) return false;
    std::this_thread::yield();
    return true;
  }

 private:
  static constexpr int kSpinsBeforeYield = 2000;  // some 20 us at 10 ns a pause
  // Longer than what lies between two calls of a step: an all-reduce over loopback takes 50 us.
  static constexpr auto kYieldTime = std::chrono::microseconds(300);
  int spins_ = 0;
  std::chrono::steady_clock::time_point sleep_at_;
};

}  // namespace

ThreadPool::ThreadPool(int num_threads) {
  CHECK_GE(num_threads, 1);
  for (int i = 1; i < num_threads; ++i)
    workers_.emplace_back([this, i] { WorkerLoop(i); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true, std::memory_order_release);
  }
  wake_.notify_all();
  for (std::thread& worker : workers_)
    worker.join();
}

void ThreadPool::ParallelFor(int64_t num_tasks, int64_t grain, Body fn) {
  if (num_tasks <= 0) return;
  CHECK_GE(grain, 1);
  const int64_t threads = num_threads();
  const int64_t grains = (num_tasks + grain - 1) / grain;
  if (threads == 1 || grains == 1) {
    fn(0, num_tasks, 0);
    return;
  }
  job_ = {&fn, num_tasks, (grains + threads - 1) / threads * grain};
  pending_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
  generation_.fetch_add(1);
  if (sleepers_.load() > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  RunRange(0);
  Spinner spinner;
  while (pending_.load(std::memory_order_acquire) != 0) {
    if (spinner.Wait()) continue;
    std::unique_lock<std::mutex> lock(mutex_);
    caller_sleeps_.store(true);
    done_.wait(lock, [&] { return pending_.load() == 0; });
    caller_sleeps_.store(false);
  }
}

void ThreadPool::RunRange(int thread_idx) {
  const int64_t begin = job_.range * thread_idx;
  const int64_t end = std::min(begin + job_.range, job_.num_tasks);
  if (begin < end) (*job_.body)(begin, end, thread_idx);
}

void ThreadPool::WorkerLoop(int thread_idx) {
  uint64_t seen = 0;
  Spinner spinner;
  while (true) {
    if (generation_.load(std::memory_order_acquire) != seen) {
      ++seen;
      RunRange(thread_idx);
      if (pending_.fetch_sub(1) == 1 && caller_sleeps_.load()) {
        std::lock_guard<std::mutex> lock(mutex_);
        done_.notify_one();
      }
      spinner = Spinner();
    } else if (stop_.load(std::memory_order_acquire)) {
      return;
    } else {
      const bool in_step = in_step_.load(std::memory_order_acquire);
      if (in_step && spinner.Wait()) continue;
      std::unique_lock<std::mutex> lock(mutex_);
      ++sleepers_;
      // Out of a step it also wakes for the next one, to be there when the first call comes.
      wake_.wait(lock, [&] {
        return stop_.load() || (!in_step && in_step_.load()) || generation_.load() != seen;
      });
      --sleepers_;
      spinner = Spinner();
    }
  }
}

ThreadPool::Step::Step(ThreadPool& pool) : pool_(pool) {
  std::lock_guard<std::mutex> lock(pool_.mutex_);
  CHECK(!pool_.in_step_.load()) << "steps do not nest";
  pool_.in_step_.store(true, std::memory_order_release);
  pool_.wake_.notify_all();
}

ThreadPool::Step::~Step() {
  pool_.in_step_.store(false, std::memory_order_release);
}

}  // namespace twinspark
