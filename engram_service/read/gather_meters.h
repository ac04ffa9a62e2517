// What the gather engine and the sessions count per layer and class, and how long things take. One
// writer (the owner thread of the engine), any number of readers: a count is a relaxed load and
// store, so neither a lock nor a copy is paid for on the way of a row. Values only grow, in_flight
// apart. Spec: engram.md 4.8.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "engram_service/store/hash_params.h"

namespace twinspark::engram {

inline constexpr int kMaxLayers = 4;
inline constexpr int kNumClasses = 3;  // 0 decode, 1 bulk prefill, 2 hint

class Count {
 public:
  void Set(uint64_t value) { value_.store(value, std::memory_order_relaxed); }
  void Add(uint64_t value = 1) { Set(get() + value); }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

inline constexpr std::array<uint64_t, 16> kTimeBoundsNs = {
    10'000,      20'000,      50'000,      100'000,      200'000,    500'000,
    1'000'000,   2'000'000,   5'000'000,   10'000'000,   20'000'000, 50'000'000,
    100'000'000, 200'000'000, 500'000'000, 1'000'000'000};
inline constexpr std::array<uint64_t, 9> kDepthBounds = {1, 2, 4, 8, 16, 32, 64, 96, 128};

// How many values fell into each bucket; a bound belongs to its bucket, the last one has none.
class Distribution {
 public:
  static constexpr size_t kBucketsMax = kTimeBoundsNs.size() + 1;

  // At most kBucketsMax - 1 ascending bounds, which live as long as this.
  explicit Distribution(std::span<const uint64_t> bounds = kTimeBoundsNs) : bounds_(bounds) {}

  void Observe(uint64_t value) {
    const auto bound = std::lower_bound(bounds_.begin(), bounds_.end(), value);
    counts_[static_cast<size_t>(bound - bounds_.begin())].Add();
    sum_.Add(value);
  }
  std::span<const uint64_t> bounds() const { return bounds_; }
  std::span<const Count> counts() const { return std::span(counts_).first(bounds_.size() + 1); }
  uint64_t sum() const { return sum_.get(); }

 private:
  std::span<const uint64_t> bounds_;
  std::array<Count, kBucketsMax> counts_;
  Count sum_;
};

struct LayerClassMeters {
  Count rows;  // wanted
  Count rows_deduplicated;
  Count reads;  // blocks
  Count read_bytes;
  Count retries;
  Count check_failures;
  Count timeouts;
  std::array<Count, kMaxNgram + 1> cache_hits;  // n-grams by order
  std::array<Count, kMaxNgram + 1> cache_misses;
  Distribution gather_ns;  // from a request taken from a ring to the layer reported
};

struct ClassMeters {
  Count requests;  // of the rings
  Count tokens;
  Count dead_tokens;
  Count busy;             // refused: over the bound of the class
  Distribution queue_ns;  // from a request's submission to when it was taken
};

// Overload (engram.md 4.6): a request of class 1 that has waited for its first row for longer than
// this, in the ring or behind others, says that the drive cannot keep up with the chunks; whoever
// plans them should make them smaller. The state outlasts its cause a little, so that it is seen.
inline constexpr int64_t kQueueAgeNsMax = 50'000'000;
inline constexpr int64_t kOverloadHoldNs = 1'000'000'000;

struct GatherMeters {
  std::array<std::array<LayerClassMeters, kNumClasses>, kMaxLayers> layers;
  std::array<ClassMeters, kNumClasses> classes;
  Distribution read_ns;              // from a block handed to the reader to its bytes reaped
  Distribution depth{kDepthBounds};  // reads on their way, at every hand-over
  Count in_flight;                   // reads on their way now
  Count overloads;                   // times that overload began
  Count overloaded_until_ns;         // CLOCK_MONOTONIC

  bool overloaded(int64_t now_ns) const {
    return now_ns < static_cast<int64_t>(overloaded_until_ns.get());
  }
};

}  // namespace twinspark::engram
