// What a worker counts about itself (operations specification 10), for a Prometheus that scrapes it
// at METRICS_ADDR. OnOp runs on the compute thread, Refresh on the main thread: prometheus-cpp's
// own locks are short. The catalogue of names is in this folder's README.
#pragma once

#include <map>
#include <string>

#include "common/metrics.h"
#include "shard_worker/runtime/worker_core.h"

namespace twinspark {

class WorkerMetrics {
 public:
  explicit WorkerMetrics(Metrics& metrics);

  void OnOp(const WorkerOp& op, const OpOutcome& outcome);
  // Gauges; call it about once a second.
  void Refresh(const WorkerStatus& status);

 private:
  Metrics& metrics_;
  prometheus::Counter& collective_seconds_;
  prometheus::Counter& engram_wait_seconds_;
  prometheus::Counter& queue_seconds_;
  prometheus::Counter& rows_;
  prometheus::Counter& non_finite_;
  prometheus::Gauge& epoch_;
  prometheus::Gauge& slots_used_;
  prometheus::Gauge& pages_used_;
  prometheus::Gauge& pages_total_;
};

}  // namespace twinspark
