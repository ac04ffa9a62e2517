// Time as a parameter: what decides by time gets a Clock. Thread-safe.
#pragma once

#include <cstdint>

namespace twinspark {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual int64_t NowUs() const = 0;  // monotonic; the origin means nothing

  int64_t NowMs() const { return NowUs() / 1000; }
};

// The machine's monotonic clock.
class SteadyClock : public Clock {
 public:
  int64_t NowUs() const override;
};

// Wall clock, for log lines and the `created` field of responses.
int64_t UnixTimeUs();

}  // namespace twinspark
