// See worker_metrics.h.
#include "shard_worker/worker_metrics.h"

#include <vector>

#include "common/build_info.h"

namespace twinspark {
namespace {

const std::vector<double>& StepBuckets() {
  static const std::vector<double> buckets = {0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05,
                                              0.1,    0.2,   0.5,   1.0,   2.0,  5.0,  10.0};
  return buckets;
}

// What dominates the op.
const char* KindOf(const WorkerOp& op) {
  if (op.chunk_slice.has_value()) return "chunk";
  if (!op.short_prefill.empty()) return op.round.empty() ? "prefill" : "mixed";
  return op.round.empty() ? "control" : "round";
}

bool AnyNonFinite(const std::vector<SequenceOutcome>& sequences) {
  for (const SequenceOutcome& sequence : sequences) {
    if (sequence.result.non_finite) return true;
  }
  return false;
}

double Seconds(int64_t us) {
  return static_cast<double>(us) * 1e-6;
}

}  // namespace

WorkerMetrics::WorkerMetrics(Metrics& metrics)
    : metrics_(metrics),
      collective_seconds_(metrics.Counter("dsv_worker_collective_seconds_total",
                                          "Seconds spent in collectives, waiting included.")),
      engram_wait_seconds_(metrics.Counter("dsv_worker_engram_wait_seconds_total",
                                           "Seconds that steps waited for Engram rows.")),
      queue_seconds_(metrics.Counter("dsv_worker_queue_seconds_total",
                                     "Seconds that ops waited for the compute thread.")),
      rows_(metrics.Counter("dsv_worker_rows_total", "Rows computed.")),
      non_finite_(metrics.Counter("dsv_worker_non_finite_total",
                                  "Ops with a row whose logits were not finite.")),
      epoch_(metrics.Gauge("dsv_worker_epoch", "Number of the running or last epoch.")),
      slots_used_(metrics.Gauge("dsv_worker_slots_used", "Open sequence slots.")),
      pages_used_(metrics.Gauge("dsv_worker_pages_used", "KV pages in a block table.")),
      pages_total_(metrics.Gauge("dsv_worker_pages", "KV pages granted.")) {
  metrics.Gauge("dsv_build_info", "1, with the build as a label.", {{"build", BuildId()}}).Set(1);
}

void WorkerMetrics::OnOp(const WorkerOp& op, const OpOutcome& outcome) {
  const OpTimings& timings = outcome.timings;
  metrics_
      .Histogram("dsv_worker_step_seconds", "Seconds per op by what it computes.", StepBuckets(),
                 {{"kind", KindOf(op)}})
      .Observe(Seconds(timings.total_us));
  collective_seconds_.Increment(Seconds(timings.collectives_us));
  engram_wait_seconds_.Increment(Seconds(timings.engram_wait_us));
  queue_seconds_.Increment(Seconds(timings.queue_us));
  rows_.Increment(timings.rows);
  if (AnyNonFinite(outcome.round) || AnyNonFinite(outcome.short_prefill)) non_finite_.Increment();
  if (!outcome.status.ok()) {
    metrics_
        .Counter("dsv_worker_op_errors_total", "Ops that failed or were refused, by status.",
                 {{"code", absl::StatusCodeToString(outcome.status.code())}})
        .Increment();
  }
}

void WorkerMetrics::Refresh(const WorkerStatus& status) {
  for (const WorkerState state :
       {WorkerState::kIdle, WorkerState::kLoading, WorkerState::kJoining, WorkerState::kReady,
        WorkerState::kServing, WorkerState::kDraining, WorkerState::kFailed}) {
    metrics_
        .Gauge("dsv_worker_state", "1 for the state the worker is in.",
               {{"state", WorkerStateName(state)}})
        .Set(status.state == state ? 1 : 0);
  }
  epoch_.Set(static_cast<double>(status.epoch));
  slots_used_.Set(status.slots_in_use);
  pages_used_.Set(status.pages_in_use);
  pages_total_.Set(status.limits.num_pages);
  for (const MemoryUse& row : status.memory) {
    const prometheus::Labels part = {{"part", row.name}};
    metrics_.Gauge("dsv_worker_memory_planned_bytes", "Planned bytes by part.", part)
        .Set(static_cast<double>(row.planned_bytes));
    metrics_.Gauge("dsv_worker_memory_bytes", "Allocated bytes by part.", part)
        .Set(static_cast<double>(row.used_bytes));
  }
  metrics_.Gauge("dsv_worker_engram_requests", "Requests to the row service in this epoch.")
      .Set(static_cast<double>(status.row_service.requests));
  metrics_.Gauge("dsv_worker_engram_errors", "Errors of the row service in this epoch.")
      .Set(static_cast<double>(status.row_service.errors));
}

}  // namespace twinspark
