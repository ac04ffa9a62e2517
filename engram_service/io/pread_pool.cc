// A finished read rings the eventfd only when the list of finished reads was empty: an owner that
// is behind is not woken once per read.
#include "engram_service/io/pread_pool.h"

#include <cerrno>

#include <sys/eventfd.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

#include "common/check.h"

namespace twinspark::engram {

PreadPool::PreadPool(size_t num_threads, size_t depth)
    : depth_(depth), pool_(depth + kReapMax), event_fd_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  CHECK_GE(event_fd_, 0);
  for (size_t i = 0; i < num_threads; ++i)
    threads_.emplace_back([this] { Run(); });
}

PreadPool::~PreadPool() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  queued_.notify_all();
  for (std::thread& thread : threads_)
    thread.join();
  close(event_fd_);
}

std::string PreadPool::name() const {
  return absl::StrCat("pread ", threads_.size(), " threads");
}

void PreadPool::Submit(const BlockRead& read) {
  batch_.push_back({read, pool_.Take()});
  ++in_flight_;
}

void PreadPool::Flush() {
  if (batch_.empty()) return;
  {
    const std::lock_guard lock(mutex_);
    queue_.insert(queue_.end(), batch_.begin(), batch_.end());
  }
  if (batch_.size() == 1) {
    queued_.notify_one();
  } else {
    queued_.notify_all();
  }
  batch_.clear();
}

size_t PreadPool::Reap(std::span<BlockDone> out, bool wait) {
  std::unique_lock lock(mutex_);
  if (wait) finished_.wait(lock, [this] { return !done_.empty(); });
  uint64_t ignored;
  while (read(event_fd_, &ignored, sizeof(ignored)) > 0) {
  }
  size_t count = 0;
  while (count < out.size() && !done_.empty()) {
    out[count++] = done_.front();
    done_.pop_front();
  }
  in_flight_ -= count;
  if (!done_.empty()) {
    const uint64_t one = 1;
    CHECK_EQ(write(event_fd_, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
  }
  return count;
}

void PreadPool::Run() {
  std::unique_lock lock(mutex_);
  for (;;) {
    queued_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    const Queued work = queue_.front();
    queue_.pop_front();
    lock.unlock();
    uint8_t* data = pool_.Data(work.buffer);
    ssize_t n;
    do {
      n = pread(work.read.fd, data, 4096, static_cast<off_t>(work.read.block_idx * 4096));
    } while (n < 0 && errno == EINTR);
    BlockDone done;
    done.tag = work.read.tag;
    done.error = n < 0 ? errno : 0;
    done.bytes = n < 0 ? 0 : static_cast<uint32_t>(n);
    done.data = {data, done.bytes};
    done.buffer = work.buffer;
    lock.lock();
    done_.push_back(done);
    if (done_.size() == 1) {
      const uint64_t one = 1;
      CHECK_EQ(write(event_fd_, &one, sizeof(one)), static_cast<ssize_t>(sizeof(one)));
      finished_.notify_one();
    }
  }
}

}  // namespace twinspark::engram
