// The metrics of the engine, by what happened; which series that moves is known here only. Names:
// our own with prefix dsv_ (operations specification 10) and, where existing dashboards look for
// one, the same value under its vLLM name (chat specification 4.14). The README's catalogue is
// compared with this file by a test. Called on the engine thread; scraped from any.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/metrics.h"
#include "gateway/engine/engine_status.h"
#include "gateway/engine/generate_request.h"
#include "gateway/engine/worker_types.h"
#include "gateway/scheduler/scheduler.h"

namespace twinspark::gateway {

// What became of one request, in seconds; phases that were not reached are negative.
struct RequestTimes {
  double queue_s = -1;
  double prefill_s = -1;  // admitted to first token
  double decode_s = -1;   // first to last token
  double e2e_s = 0;
};

// What one op took, in seconds.
struct StepTimes {
  double step_s = 0;     // from when it was sent, or the one before it was done, to its last result
  double gateway_s = 0;  // before that: the workers had nothing to do and the gateway had
  double deadline_s = 0;
};

class EngineMetrics {
 public:
  EngineMetrics(Metrics& metrics, const std::string& model_name, const std::string& build_id);

  // `reason`: draining, not_ready, too_long, bad_token, bad_parameter, queue_full. Any thread.
  void OnRejected(const std::string& reason);
  void OnFirstToken(double ttft_s);
  void OnNextTokens(double gap_s);
  // `reason`: stop, length, abort, error.
  void OnEnd(const std::string& reason,
             const RequestTimes& times,
             int32_t num_prompt_tokens,
             int32_t num_completion_tokens);
  void OnStep(const StepPlan& plan, const StepTimes& times, const RankResult& rank0);
  // `cause`: closed, silent, deadline, op_failed, divergence, protocol.
  void OnEpochEnd(const std::string& cause);
  void OnDivergence();

  // Gauges, and counters kept by the scheduler.
  void Publish(const EngineStatus& status, const SchedulerCounters& counters);

 private:
  // One value under our name and, where there is one, the vLLM name.
  struct Counters {
    std::vector<prometheus::Counter*> series;
    void Add(double value) {
      for (prometheus::Counter* counter : series)
        counter->Increment(value);
    }
    // For counts kept elsewhere: raises the series to `value`.
    void RaiseTo(double value) {
      for (prometheus::Counter* counter : series) {
        if (value > counter->Value()) counter->Increment(value - counter->Value());
      }
    }
  };
  struct Gauges {
    std::vector<prometheus::Gauge*> series;
    void Set(double value) {
      for (prometheus::Gauge* gauge : series)
        gauge->Set(value);
    }
  };
  struct Histograms {
    std::vector<prometheus::Histogram*> series;
    void Observe(double value) {
      for (prometheus::Histogram* histogram : series)
        histogram->Observe(value);
    }
  };

  // An empty name is left out.
  Counters MakeCounters(const std::string& own,
                        const std::string& vllm,
                        const std::string& help,
                        const prometheus::Labels& labels = {});
  Gauges MakeGauges(const std::string& own,
                    const std::string& vllm,
                    const std::string& help,
                    const prometheus::Labels& labels = {});
  Histograms MakeHistograms(const std::string& own,
                            const std::string& vllm,
                            const std::string& help,
                            const std::vector<double>& buckets);
  void MakeStepSeries();
  prometheus::Labels VllmLabels(const prometheus::Labels& labels) const;
  // Of one rank. The series are looked up once: the registry takes microseconds for each.
  struct WorkerGauges {
    prometheus::Gauge* heartbeat_age;
    prometheus::Gauge* engram_requests;
    prometheus::Gauge* engram_errors;
    std::map<std::string, prometheus::Gauge*> memory_bytes;  // by class
  };

  void PublishWorkers(const EngineStatus& status);

  Metrics& metrics_;
  const std::string model_name_;

  Gauges running_, waiting_, kv_usage_;
  Counters preemptions_, prompt_tokens_, generation_tokens_, draft_rounds_, drafted_, accepted_;
  std::vector<Counters> accepted_at_;
  Histograms ttft_, itl_, e2e_, queue_, prefill_, decode_, prompt_length_, output_length_;
  Histograms step_tokens_;
  std::map<std::string, Counters> ended_;
  std::map<std::string, prometheus::Counter*> rejected_;
  std::map<std::string, prometheus::Counter*> epochs_ended_;
  static constexpr size_t kNumStepKinds = 5;
  static constexpr size_t kNumStepParts = 5;
  static constexpr size_t kNumStepStages = 3;
  std::array<prometheus::Histogram*, kNumStepKinds> step_seconds_;
  std::array<std::array<prometheus::Counter*, kNumStepParts>, kNumStepKinds> part_seconds_;
  std::array<double, kNumStepKinds> transport_s_{};
  std::array<prometheus::Counter*, kNumStepStages> stage_seconds_;
  prometheus::Histogram* deadline_margin_;
  prometheus::Counter* run_ahead_;
  prometheus::Counter* dropped_tokens_;
  prometheus::Counter* divergences_;
  prometheus::Gauge* epoch_;
  prometheus::Gauge* pages_used_;
  prometheus::Gauge* pages_total_;
  std::map<std::string, prometheus::Gauge*> states_;
  std::vector<WorkerGauges> workers_;  // by rank
};

}  // namespace twinspark::gateway
