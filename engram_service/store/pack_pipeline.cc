// Two readers, because one cannot read while it takes apart what it has read; three builders,
// because each waits for its own write. The number of ExtentWork objects bounds memory: 33 MiB
// each.
#include "engram_service/store/pack_pipeline.h"

#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace twinspark::engram {
namespace {

constexpr size_t kReaders = 2;
constexpr size_t kBuilders = 3;
constexpr size_t kSlots = kReaders + kBuilders + 5;  // the rest waits while a sync lasts

// Bounded by the number of ExtentWork objects that exist. A null entry ends the line for one
// thread.
class Line {
 public:
  void Push(std::unique_ptr<ExtentWork> work) {
    {
      const std::lock_guard lock(mutex_);
      queue_.push_back(std::move(work));
    }
    changed_.notify_one();
  }
  std::unique_ptr<ExtentWork> Pop() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return !queue_.empty(); });
    auto work = std::move(queue_.front());
    queue_.pop_front();
    return work;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::unique_ptr<ExtentWork>> queue_;
};

struct Lines {
  Line free;
  Line read;
  Line written;
  std::atomic<size_t> next{0};  // of the extents
  std::atomic<size_t> readers_left{kReaders};
};

void RunReader(std::span<const uint64_t> extents, const PackSteps& steps, Lines& lines) {
  AlignedBuffer buffer;
  for (;;) {
    const size_t index = lines.next.fetch_add(1);
    if (index >= extents.size()) break;
    auto work = lines.free.Pop();
    if (work == nullptr) break;
    work->extent = extents[index];
    work->status = steps.read(*work, buffer);
    const bool ok = work->status.ok();
    lines.read.Push(std::move(work));
    if (!ok) break;
  }
  if (--lines.readers_left > 0) return;
  for (size_t i = 0; i < kBuilders; ++i)
    lines.read.Push(nullptr);
}

void RunBuilder(const PackSteps& steps, Lines& lines) {
  while (auto work = lines.read.Pop()) {
    if (work->status.ok()) work->status = steps.build_and_write(*work);
    lines.written.Push(std::move(work));
  }
  lines.written.Push(nullptr);
}

}  // namespace

absl::Status RunPackSteps(std::span<const uint64_t> extents, const PackSteps& steps) {
  Lines lines;
  for (size_t i = 0; i < kSlots; ++i)
    lines.free.Push(std::make_unique<ExtentWork>());
  std::vector<std::thread> threads;
  for (size_t i = 0; i < kReaders; ++i)
    threads.emplace_back([&] { RunReader(extents, steps, lines); });
  for (size_t i = 0; i < kBuilders; ++i)
    threads.emplace_back([&] { RunBuilder(steps, lines); });
  absl::Status status;
  for (size_t ended = 0; ended < kBuilders;) {
    auto work = lines.written.Pop();
    if (work == nullptr) {
      ++ended;
      continue;
    }
    if (status.ok()) status = work->status;
    if (status.ok()) status = steps.note(*work);
    // After an error every object comes back as the end of the line: more of them than readers.
    lines.free.Push(status.ok() ? std::move(work) : nullptr);
  }
  for (std::thread& thread : threads)
    thread.join();
  return status;
}

}  // namespace twinspark::engram
