// Goal: every task runs exactly once, by a thread number within the pool, whether the pool sleeps
// or spins, and results are visible to the caller. Nothing here depends on timing.
#include "kernels/thread_pool.h"

#include <atomic>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

namespace twinspark {
namespace {

// Plain (not atomic) counters: a missing barrier is a data race that TSan sees.
void ExpectEachTaskOnce(ThreadPool& pool, int64_t num_tasks, int64_t grain) {
  std::vector<int> runs(static_cast<size_t>(num_tasks), 0);
  std::atomic<int> bad{0};
  pool.ParallelFor(num_tasks, grain, [&](int64_t begin, int64_t end, int thread_idx) {
    if (thread_idx < 0 || thread_idx >= pool.num_threads()) ++bad;
    if (begin % grain != 0 || (end % grain != 0 && end != num_tasks) || begin >= end) ++bad;
    for (int64_t i = begin; i < end; ++i)
      ++runs[static_cast<size_t>(i)];
  });
  EXPECT_EQ(bad.load(), 0);
  for (int count : runs)
    ASSERT_EQ(count, 1) << num_tasks << " tasks, grain " << grain;
}

TEST(ThreadPool, EveryTaskOnceAsleepAndInAStep) {
  for (int threads : {1, 2, 3, 7}) {
    ThreadPool pool(threads);
    ASSERT_EQ(pool.num_threads(), threads);
    for (int64_t num_tasks : {0, 1, 2, 5, 64, 1001}) {
      for (int64_t grain : {1, 3, 64, 5000})
        ExpectEachTaskOnce(pool, num_tasks, grain);
    }
    const ThreadPool::Step step(pool);
    for (int64_t num_tasks : {0, 1, 2, 5, 64, 1001})
      ExpectEachTaskOnce(pool, num_tasks, 4);
  }
}

TEST(ThreadPool, ManyBarriersInAStepKeepTheirOrder) {
  ThreadPool pool(3);
  std::vector<int64_t> values(300, 0);
  for (int round = 0; round < 20; ++round) {
    const ThreadPool::Step step(pool);
    for (int barrier = 0; barrier < 160; ++barrier) {
      // Every task reads what another task wrote before the last barrier.
      std::vector<int64_t> next(values.size());
      pool.ParallelFor(static_cast<int64_t>(values.size()), 1,
                       [&](int64_t begin, int64_t end, int) {
                         for (int64_t i = begin; i < end; ++i) {
                           const size_t from = (static_cast<size_t>(i) + 101) % values.size();
                           next[static_cast<size_t>(i)] = values[from] + 1;
                         }
                       });
      values.swap(next);
    }
  }
  for (int64_t value : values)
    ASSERT_EQ(value, 20 * 160);
}

TEST(ThreadPool, AThreadKeepsItsNumberToItself) {
  ThreadPool pool(4);
  std::vector<int64_t> sums(4, 0);  // written without locks by the number's owner
  for (int i = 0; i < 100; ++i) {
    pool.ParallelFor(1000, 1, [&](int64_t begin, int64_t end, int thread_idx) {
      sums[static_cast<size_t>(thread_idx)] += end - begin;
    });
  }
  EXPECT_EQ(std::accumulate(sums.begin(), sums.end(), int64_t{0}), 100 * 1000);
}

int64_t ThreadsOfThisProcess() {
  const std::filesystem::directory_iterator tasks("/proc/self/task");
  return std::distance(begin(tasks), end(tasks));
}

// Threads of this process that sleep; the state letter follows the name in parentheses.
int64_t SleepingThreads() {
  int64_t sleeping = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "stat");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    const size_t name_end = text.rfind(')');
    sleeping += name_end != std::string::npos && text.substr(name_end, 3) == ") S" ? 1 : 0;
  }
  return sleeping;
}

// Workers that wait long in a step sleep and come back for the next call; so does the caller when a
// worker takes long.
TEST(ThreadPool, WhoWaitsLongInAStepSleepsAndComesBack) {
  const int64_t before = SleepingThreads();
  ThreadPool pool(3);
  const ThreadPool::Step step(pool);
  for (int round = 0; round < 3; ++round) {
    ExpectEachTaskOnce(pool, 300, 1);
    for (int tries = 0; tries < 10000 && SleepingThreads() < before + 2; ++tries)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    EXPECT_GE(SleepingThreads(), before + 2);
    std::atomic<bool> caller_slept{false};
    pool.ParallelFor(3, 1, [&](int64_t begin, int64_t, int thread_idx) {
      if (thread_idx != 1 || begin != 1) return;
      // The caller and the third thread have nothing left to do.
      for (int tries = 0; tries < 10000 && SleepingThreads() < before + 2; ++tries)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      caller_slept = SleepingThreads() >= before + 2;
    });
    EXPECT_TRUE(caller_slept);
  }
  for (int i = 0; i < 2000; ++i)  // calls that race with falling asleep
    ExpectEachTaskOnce(pool, 3 + i % 5, 1);
}

// A pool that never had work, in and out of a step, leaves no thread behind.
TEST(ThreadPool, StartsAndStopsIdle) {
  const int64_t before = ThreadsOfThisProcess();
  for (int i = 0; i < 20; ++i) {
    ThreadPool pool(3);
    EXPECT_GE(ThreadsOfThisProcess(), before + 2);
    if (i % 2 == 0) {
      const ThreadPool::Step step(pool);
    }
  }
  // A joined thread may stay listed for a moment.
  for (int tries = 0; tries < 3000 && ThreadsOfThisProcess() > before; ++tries)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  EXPECT_EQ(ThreadsOfThisProcess(), before);
}

TEST(ThreadPoolDeathTest, StepsDoNotNest) {  // a pool of one has no threads, so forking is safe
  EXPECT_DEATH(
      {
        ThreadPool pool(1);
        const ThreadPool::Step outer(pool);
        const ThreadPool::Step inner(pool);
      },
      "do not nest");
}

}  // namespace
}  // namespace twinspark
