// What bench_cluster reads from a gateway and its processes beside the load itself: the parts of a
// round from /metrics, slots and pages in use from /status, resident memory over time from /proc.
#pragma once

#include <condition_variable>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <sys/types.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "tests/load/process_stats.h"

namespace twinspark {

// Rounds without prefill rows, since the gateway started. Seconds.
struct RoundTimes {
  double count = 0;
  double seconds = 0;                   // dsv_step_seconds of kind "round", and the gateway's part
  std::map<std::string, double> parts;  // dsv_step_part_seconds_total, by part

  RoundTimes Since(const RoundTimes& earlier) const;
};

absl::StatusOr<RoundTimes> ReadRoundTimes(const std::string& url);

// Slots and pages in use by the gateway's count and by each worker's, with what is in the queue.
struct InUse {
  std::string text;
  bool nothing = false;
};

// Waits until nothing is in use, at most that long; the last reading either way.
absl::StatusOr<InUse> WaitUntilUnused(const std::string& url, double seconds_max);

// Reads the processes' memory in the background at even intervals. The first reading comes when a
// tenth of the time is over: then every process has served.
class MemoryWatch {
 public:
  MemoryWatch(pid_t supervisor, double seconds);
  ~MemoryWatch();
  MemoryWatch(const MemoryWatch&) = delete;
  MemoryWatch& operator=(const MemoryWatch&) = delete;

  struct Line {
    std::string name;
    double first_mib = 0;
    double middle_mib = 0;
    double last_mib = 0;
    // No more than a twentieth and some allocator's rounding above the middle of the run.
    bool is_flat() const { return last_mib <= 1.05 * middle_mib + 4; }
  };
  // Reads once more and stops. Empty when processes came or went meanwhile.
  std::vector<Line> Finish();

 private:
  void Run();
  void Read();

  const pid_t supervisor_;
  const double period_s_;
  std::mutex mutex_;
  std::condition_variable stopped_;
  bool stop_ = false;
  std::vector<std::vector<ProcessStats>> readings_;
  std::thread thread_;
};

}  // namespace twinspark
