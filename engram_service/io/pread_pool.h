// Block reads by a pool of threads, one read per thread at a time: where io_uring is forbidden.
// The owner thread submits and reaps; the pool's threads only read. Spec: engram.md 4.3.
#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "engram_service/io/aligned_pool.h"
#include "engram_service/io/block_reader.h"

namespace twinspark::engram {

class PreadPool : public BlockReader {
 public:
  PreadPool(size_t num_threads, size_t depth);
  ~PreadPool() override;
  PreadPool(const PreadPool&) = delete;
  PreadPool& operator=(const PreadPool&) = delete;

  std::string name() const override;
  size_t depth() const override { return depth_; }
  size_t in_flight() const override { return in_flight_; }
  void Submit(const BlockRead& read) override;
  void Flush() override;
  size_t Reap(std::span<BlockDone> out, bool wait) override;
  void Release(uint32_t buffer) override { pool_.Give(buffer); }
  int event_fd() const override { return event_fd_; }

 private:
  struct Queued {
    BlockRead read;
    uint32_t buffer;
  };
  void Run();

  const size_t depth_;
  size_t in_flight_ = 0;       // owner thread
  AlignedPool pool_;           // owner thread
  std::vector<Queued> batch_;  // owner thread, until Flush
  int event_fd_;
  std::mutex mutex_;
  std::condition_variable queued_;
  std::condition_variable finished_;
  std::deque<Queued> queue_;
  std::deque<BlockDone> done_;
  bool stop_ = false;
  std::vector<std::thread> threads_;
};

}  // namespace twinspark::engram
