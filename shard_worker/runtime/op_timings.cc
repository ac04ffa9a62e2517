// See op_timings.h.
#include "shard_worker/runtime/op_timings.h"

#include <algorithm>

namespace twinspark {
namespace {

constexpr const char* kNames[] = {"queue",  "engram_wait", "compute", "collectives",
                                  "sample", "draft",       "total"};

double Quantile(const std::vector<int64_t>& sorted, double q) {
  if (sorted.empty()) return 0;
  const auto index = static_cast<size_t>(q * static_cast<double>(sorted.size() - 1) + 0.5);
  return static_cast<double>(sorted[index]);
}

}  // namespace

void OpTimingTable::Add(const OpTimings& timings) {
  const std::array<int64_t, kParts> values = {
      timings.queue_us,  timings.engram_wait_us, timings.compute_us, timings.collectives_us,
      timings.sample_us, timings.draft_us,       timings.total_us};
  const std::lock_guard<std::mutex> lock(mutex_);
  for (size_t part = 0; part < kParts; ++part)
    samples_[part][count_ % kSamples] = values[part];
  ++count_;
}

void OpTimingTable::Clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  count_ = 0;
}

std::vector<OpTimingSummary> OpTimingTable::Summaries() const {
  std::vector<OpTimingSummary> summaries;
  const std::lock_guard<std::mutex> lock(mutex_);
  if (count_ == 0) return summaries;
  const size_t kept = std::min<size_t>(count_, kSamples);
  for (size_t part = 0; part < kParts; ++part) {
    std::vector<int64_t> sorted(samples_[part].begin(),
                                samples_[part].begin() + static_cast<std::ptrdiff_t>(kept));
    std::sort(sorted.begin(), sorted.end());
    summaries.push_back({kNames[part], count_, Quantile(sorted, 0.5), Quantile(sorted, 0.9),
                         Quantile(sorted, 0.99), static_cast<double>(sorted.back())});
  }
  return summaries;
}

}  // namespace twinspark
