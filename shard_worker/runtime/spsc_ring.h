// A bounded queue between one producing and one consuming thread that share no lock: the op log on
// its way to the compute thread and the results on their way back. So the thread that sends
// heartbeats can never wait for the compute thread, nor the other way round.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <optional>
#include <semaphore>
#include <utility>

namespace twinspark {

template <class T, size_t kCapacity>
class SpscRing {
 public:
  // False when full. Producer thread only.
  bool Push(T value) {
    const size_t tail = tail_.load(std::memory_order_relaxed);
    if (tail - head_.load(std::memory_order_acquire) == kCapacity) return false;
    items_[tail % kCapacity] = std::move(value);
    tail_.store(tail + 1, std::memory_order_release);
    Wake();
    return true;
  }

  // Consumer thread only.
  std::optional<T> Pop() {
    const size_t head = head_.load(std::memory_order_relaxed);
    if (head == tail_.load(std::memory_order_acquire)) return std::nullopt;
    std::optional<T> value = std::move(items_[head % kCapacity]);
    items_[head % kCapacity] = T();
    head_.store(head + 1, std::memory_order_release);
    return value;
  }

  // Consumer thread: sleeps until something was pushed or Wake was called. May return early.
  void Wait() { available_.acquire(); }
  void WaitFor(std::chrono::microseconds limit) { (void)available_.try_acquire_for(limit); }

  // Any thread.
  void Wake() { available_.release(); }

 private:
  std::array<T, kCapacity> items_{};
  std::atomic<size_t> head_{0};  // items taken so far
  std::atomic<size_t> tail_{0};  // items put so far
  std::counting_semaphore<> available_{0};
};

}  // namespace twinspark
