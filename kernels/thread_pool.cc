// See thread_pool.h. Release/acquire pairs: generation_ publishes job_ to the workers, pending_
// publishes their results back.
#include "kernels/thread_pool.h"

#include <algorithm>

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

// Spins politely: on a machine with fewer cores than threads the scheduler gets its chance soon.
class Spinner {
 public:
  void Wait() {
    if (++spins_ < kSpinsBeforeYield) {
      CpuRelax();
    } else {
      std::this_thread::yield();
    }
  }

 private:
  static constexpr int kSpinsBeforeYield = 2000;  // some 20 us at 10 ns a pause
  int spins_ = 0;
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
  if (in_step_.load(std::memory_order_relaxed)) {
    generation_.fetch_add(1, std::memory_order_release);
  } else {
    std::lock_guard<std::mutex> lock(mutex_);
    generation_.fetch_add(1, std::memory_order_release);
    wake_.notify_all();
  }
  RunRange(0);
  Spinner spinner;
  while (pending_.load(std::memory_order_acquire) != 0)
    spinner.Wait();
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
      pending_.fetch_sub(1, std::memory_order_release);
      spinner = Spinner();
    } else if (stop_.load(std::memory_order_acquire)) {
      return;
    } else if (in_step_.load(std::memory_order_acquire)) {
      spinner.Wait();
    } else {
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, [&] {
        return stop_.load() || in_step_.load() ||
               generation_.load(std::memory_order_acquire) != seen;
      });
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
