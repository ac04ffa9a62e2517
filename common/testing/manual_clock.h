// A Clock that tests move by hand. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>

#include "common/clock.h"

namespace twinspark {

class ManualClock : public Clock {
 public:
  int64_t NowUs() const override { return now_us_.load(); }
  void AdvanceMs(int64_t ms) { now_us_ += ms * 1000; }

 private:
  std::atomic<int64_t> now_us_{1'000'000};
};

}  // namespace twinspark
