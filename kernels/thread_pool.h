// The one pool of compute threads, passed in to every CPU op.
// Inside a Step workers spin between ParallelFor calls (a forward step has some 160 of them;
// blocking ones cost more than the second core brings), as long as the next one comes soon: who has
// waited for a while sleeps, so that a machine with more threads than cores gives its cores to
// those that compute. Between steps they sleep. The calling thread takes part, so a pool of one
// runs everything inline. How a range is cut never changes a result: ops split only rows, heads or
// column blocks, never a reduction. ParallelFor is called from one thread at a time (the owner of
// the step); it is not re-entrant.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace twinspark {

class ThreadPool {
 public:
  // fn(begin, end, thread_idx) for disjoint ranges that cover [0, num_tasks); thread_idx <
  // num_threads().
  using Body = absl::FunctionRef<void(int64_t begin, int64_t end, int thread_idx)>;

  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(workers_.size()) + 1; }

  // Cuts [0, num_tasks) into num_threads() contiguous ranges whose borders are multiples of
  // `grain`, runs them, returns when all are done. Runs inline when one range suffices.
  void ParallelFor(int64_t num_tasks, int64_t grain, Body fn);

  // While a Step lives, idle workers spin instead of sleeping.
  class Step {
   public:
    explicit Step(ThreadPool& pool);
    ~Step();
    Step(const Step&) = delete;
    Step& operator=(const Step&) = delete;

   private:
    ThreadPool& pool_;
  };

 private:
  struct Job {
    const Body* body = nullptr;
    int64_t num_tasks = 0;
    int64_t range = 0;
  };

  void WorkerLoop(int thread_idx);
  void RunRange(int thread_idx);

  std::vector<std::thread> workers_;
  Job job_;
  std::atomic<uint64_t> generation_{0};  // one more per ParallelFor; publishes job_
  std::atomic<int> pending_{0};          // workers that have not finished the current job
  std::atomic<bool> in_step_{false};
  std::atomic<bool> stop_{false};
  // Whoever changes what a sleeper waits for looks here afterwards; whoever goes to sleep says so
  // here first and then looks once more (all sequentially consistent): one of the two sees the
  // other.
  std::atomic<int> sleepers_{0};            // workers
  std::atomic<bool> caller_sleeps_{false};  // in ParallelFor
  std::mutex mutex_;                        // only for sleeping
  std::condition_variable wake_;
  std::condition_variable done_;  // pending_ became 0
};

}  // namespace twinspark
