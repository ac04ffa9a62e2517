// Quantiles of what the last ops took, for Status: fixed memory, a ring of samples per measured
// part. Written by the compute thread, read by Status; one short lock that heartbeats do not take.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "shard_worker/runtime/worker_op.h"

namespace twinspark {

struct OpTimingSummary {
  std::string name;
  uint64_t count = 0;  // of all samples since the start of the epoch
  double p50_us = 0;
  double p90_us = 0;
  double p99_us = 0;
  double max_us = 0;  // of the samples kept
};

class OpTimingTable {
 public:
  void Add(const OpTimings& timings);
  void Clear();
  std::vector<OpTimingSummary> Summaries() const;

 private:
  static constexpr size_t kParts = 7;
  static constexpr size_t kSamples = 512;

  mutable std::mutex mutex_;
  uint64_t count_ = 0;
  std::array<std::array<int64_t, kSamples>, kParts> samples_{};
};

}  // namespace twinspark
