// The best of a stream of scores whose indices ascend: the higher score, among equals the lower
// index. Memory follows the capacity, not the length of the stream. What works on it is
// top_set-inl.h. Not thread-safe.
#pragma once

#include <bit>
#include <cstdint>
#include <limits>

namespace twinspark {

// Scores that cannot be among the best any more are skipped by one comparison; the rest gather in
// order and are pruned whenever twice the capacity is there.
struct TopSet {
  static constexpr int64_t kTile = 64;       // scores offered at a time, at most
  static constexpr int64_t kMostLanes = 16;  // a vector is stored whole
  static constexpr float kMasked = -std::numeric_limits<float>::infinity();  // never enters

  int32_t* keys = nullptr;     // [Room(capacity)], ordered as the scores are
  int32_t* indices = nullptr;  // [Room(capacity)], ascending
  int64_t capacity = 0;
  int64_t count = 0;
  float floor = kMasked;

  static constexpr int64_t Room(int64_t capacity) { return 2 * capacity + kTile + kMostLanes; }
  // Integers ordered as scores are, and back.
  static float ScoreOf(int32_t key) {
    return std::bit_cast<float>(key < 0 ? key ^ 0x7fffffff : key);
  }
  void Reset() {
    count = 0;
    floor = kMasked;
  }
};

}  // namespace twinspark
