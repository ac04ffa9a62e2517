#include "gateway/engine/engine_metrics.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "common/limits.h"

namespace twinspark::gateway {
namespace {

const std::vector<double> kTtftBuckets = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
                                          1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
const std::vector<double> kItlBuckets = {.01, .025, .05, .075, .1,  .15, .2, .3, .4, .5,
                                         .75, 1,    2.5, 5,    7.5, 10,  20, 40, 80};
const std::vector<double> kRequestBuckets = {.3, .5, .8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                             30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
const std::vector<double> kLengthBuckets = {1,     2,      5,      10,     20,     50,    100,
                                            200,   500,    1000,   2000,   5000,   10000, 20000,
                                            50000, 100000, 200000, 500000, 1000000};
const std::vector<double> kStepTokenBuckets = {1,   8,    16,   32,   64,   128,  256,
                                               512, 1024, 2048, 4096, 8192, 16384};
const std::vector<double> kStepBuckets = {.001, .002, .005, .01, .02, .05, .1,
                                          .25,  .5,   1,    2.5, 5,   10};
const std::vector<double> kMarginBuckets = {0, .1, .2, .4, .6, .8, .9, .95, 1};

// Labels of counters. Each has its series from the start on, so that a rate of it exists before the
// first time and an alert on it can be tried.
constexpr const char* kEndReasons[] = {"stop", "length", "abort", "error"};
constexpr const char* kRejectReasons[] = {"draining",  "not_ready",     "too_long",
                                          "bad_token", "bad_parameter", "queue_full"};
constexpr const char* kEpochEndCauses[] = {"closed",    "silent",     "deadline",
                                           "op_failed", "divergence", "protocol"};
enum StepKind : size_t { kRound, kPrefill, kMixed, kChunk, kControl };
constexpr const char* kStepKinds[] = {"round", "prefill", "mixed", "chunk", "control"};
// The first four add up to the time of a step.
enum StepPart : size_t { kCompute, kCollectives, kEngramWait, kTransport, kGateway };
constexpr const char* kStepParts[] = {"compute", "collectives", "engram_wait", "transport",
                                      "gateway"};
enum StepStage : size_t { kForward, kSample, kDraft };
constexpr const char* kStepStages[] = {"forward", "sample", "draft"};
constexpr EngineState kStates[] = {EngineState::kBooting, EngineState::kReady,
                                   EngineState::kDraining, EngineState::kRecovering,
                                   EngineState::kFailed};

StepKind KindOf(const StepPlan& plan) {
  if (plan.chunk) return kChunk;
  if (plan.round.empty()) return plan.short_prefill.empty() ? kControl : kPrefill;
  return plan.short_prefill.empty() ? kRound : kMixed;
}

}  // namespace

prometheus::Labels EngineMetrics::VllmLabels(const prometheus::Labels& labels) const {
  prometheus::Labels all = labels;
  all.emplace("model_name", model_name_);
  all.emplace("engine", "0");
  return all;
}

EngineMetrics::Counters EngineMetrics::MakeCounters(const std::string& own,
                                                    const std::string& vllm,
                                                    const std::string& help,
                                                    const prometheus::Labels& labels) {
  Counters out;
  if (!own.empty()) out.series.push_back(&metrics_.Counter(own, help, labels));
  if (!vllm.empty()) out.series.push_back(&metrics_.Counter(vllm, help, VllmLabels(labels)));
  return out;
}

EngineMetrics::Gauges EngineMetrics::MakeGauges(const std::string& own,
                                                const std::string& vllm,
                                                const std::string& help,
                                                const prometheus::Labels& labels) {
  Gauges out;
  if (!own.empty()) out.series.push_back(&metrics_.Gauge(own, help, labels));
  if (!vllm.empty()) out.series.push_back(&metrics_.Gauge(vllm, help, VllmLabels(labels)));
  return out;
}

EngineMetrics::Histograms EngineMetrics::MakeHistograms(const std::string& own,
                                                        const std::string& vllm,
                                                        const std::string& help,
                                                        const std::vector<double>& buckets) {
  Histograms out;
  if (!own.empty()) out.series.push_back(&metrics_.Histogram(own, help, buckets));
  if (!vllm.empty()) {
    out.series.push_back(&metrics_.Histogram(vllm, help, buckets, VllmLabels({})));
  }
  return out;
}

EngineMetrics::EngineMetrics(Metrics& metrics,
                             const std::string& model_name,
                             const std::string& build_id)
    : metrics_(metrics), model_name_(model_name) {
  running_ =
      MakeGauges("dsv_requests_running", "vllm:num_requests_running", "Requests with a slot.");
  waiting_ =
      MakeGauges("dsv_requests_waiting", "vllm:num_requests_waiting", "Requests in the queue.");
  kv_usage_ = MakeGauges("dsv_kv_usage_ratio", "vllm:kv_cache_usage_perc",
                         "Share of the KV pages in use, 0 to 1.");
  preemptions_ = MakeCounters("dsv_preemptions_total", "vllm:num_preemptions_total",
                              "Sequences closed for want of pages and opened again later.");
  prompt_tokens_ = MakeCounters("dsv_prompt_tokens_total", "vllm:prompt_tokens_total",
                                "Prompt tokens of ended requests.");
  generation_tokens_ = MakeCounters("dsv_generation_tokens_total", "vllm:generation_tokens_total",
                                    "Tokens emitted.");
  draft_rounds_ = MakeCounters("dsv_spec_rounds_total", "vllm:spec_decode_num_drafts_total",
                               "Rounds of a sequence with drafts to verify.");
  drafted_ = MakeCounters("dsv_spec_drafted_tokens_total",
                          "vllm:spec_decode_num_draft_tokens_total", "Draft tokens verified.");
  accepted_ = MakeCounters("dsv_spec_accepted_tokens_total",
                           "vllm:spec_decode_num_accepted_tokens_total", "Draft tokens accepted.");
  for (int position = 0; position < limits::kMaxDrafts; ++position) {
    accepted_at_.push_back(MakeCounters("dsv_spec_accepted_tokens_per_pos_total",
                                        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
                                        "Draft tokens accepted, by position.",
                                        {{"position", absl::StrCat(position)}}));
  }
  ttft_ = MakeHistograms("dsv_time_to_first_token_seconds", "vllm:time_to_first_token_seconds",
                         "From request accepted to its first token.", kTtftBuckets);
  itl_ = MakeHistograms("dsv_inter_token_latency_seconds", "vllm:inter_token_latency_seconds",
                        "Between two rounds of one request.", kItlBuckets);
  e2e_ = MakeHistograms("dsv_e2e_seconds", "vllm:e2e_request_latency_seconds",
                        "From request accepted to its end.", kRequestBuckets);
  queue_ = MakeHistograms("dsv_queue_seconds", "vllm:request_queue_time_seconds",
                          "From request accepted to its slot.", kRequestBuckets);
  prefill_ = MakeHistograms("dsv_prefill_seconds", "vllm:request_prefill_time_seconds",
                            "From slot to first token.", kRequestBuckets);
  decode_ = MakeHistograms("dsv_decode_seconds", "vllm:request_decode_time_seconds",
                           "From first to last token.", kRequestBuckets);
  prompt_length_ = MakeHistograms("dsv_request_prompt_tokens", "vllm:request_prompt_tokens",
                                  "Prompt tokens of a request.", kLengthBuckets);
  output_length_ = MakeHistograms("dsv_request_generation_tokens", "vllm:request_generation_tokens",
                                  "Tokens emitted for a request.", kLengthBuckets);
  step_tokens_ = MakeHistograms("dsv_step_rows", "vllm:iteration_tokens_total", "Rows of one step.",
                                kStepTokenBuckets);
  for (const char* reason : kEndReasons) {
    Counters counters = MakeCounters("dsv_requests_total", "", "Requests by their end.",
                                     {{"finish_reason", reason}});
    counters.series.push_back(MakeCounters("", "vllm:request_success_total",
                                           "Requests by their end.", {{"finished_reason", reason}})
                                  .series.front());
    ended_[reason] = counters;
  }
  for (const char* reason : kRejectReasons) {
    rejected_[reason] =
        &metrics_.Counter("dsv_requests_rejected_total",
                          "Requests refused before they were queued.", {{"reason", reason}});
  }
  for (const char* cause : kEpochEndCauses) {
    epochs_ended_[cause] = &metrics_.Counter("dsv_epochs_ended_total", "Ends of an epoch by cause.",
                                             {{"cause", cause}});
  }
  MakeStepSeries();
  metrics.Gauge("dsv_build_info", "Always 1.", {{"build", build_id}}).Set(1);
}

void EngineMetrics::MakeStepSeries() {
  for (size_t kind = 0; kind < kNumStepKinds; ++kind) {
    step_seconds_[kind] =
        &metrics_.Histogram("dsv_step_seconds", "From an op sent to its result on every rank.",
                            kStepBuckets, {{"kind", kStepKinds[kind]}});
    for (size_t part = 0; part < kNumStepParts; ++part) {
      part_seconds_[kind][part] = &metrics_.Counter(
          "dsv_step_part_seconds_total",
          "Where the time of steps goes: three parts of rank 0, what lies between, the gateway.",
          {{"kind", kStepKinds[kind]}, {"part", kStepParts[part]}});
    }
  }
  for (size_t stage = 0; stage < kNumStepStages; ++stage) {
    stage_seconds_[stage] =
        &metrics_.Counter("dsv_step_stage_seconds_total",
                          "Stages of rank 0's steps, each with its collectives and waits.",
                          {{"stage", kStepStages[stage]}});
  }
  deadline_margin_ = &metrics_.Histogram(
      "dsv_step_deadline_margin_ratio", "Share of an op's deadline that was left.", kMarginBuckets);
  run_ahead_ =
      &metrics_.Counter("dsv_run_ahead_steps_total", "Steps sent before the previous result.");
  dropped_tokens_ =
      &metrics_.Counter("dsv_dropped_tokens_total", "Tokens computed beyond the end of a request.");
  divergences_ = &metrics_.Counter("dsv_divergences_total", "Ops whose digests differed.");
  epoch_ = &metrics_.Gauge("dsv_epoch", "Number of the epoch.");
  pages_used_ = &metrics_.Gauge("dsv_kv_pages", "KV pages by state.", {{"state", "used"}});
  pages_total_ = &metrics_.Gauge("dsv_kv_pages", "KV pages by state.", {{"state", "total"}});
  for (const EngineState state : kStates) {
    states_[EngineStateName(state)] =
        &metrics_.Gauge("dsv_group_state", "1 for the state the gateway is in.",
                        {{"state", EngineStateName(state)}});
  }
}

void EngineMetrics::OnRejected(const std::string& reason) {
  rejected_.at(reason)->Increment();
}

void EngineMetrics::OnFirstToken(double ttft_s) {
  ttft_.Observe(ttft_s);
}

void EngineMetrics::OnNextTokens(double gap_s) {
  itl_.Observe(gap_s);
}

void EngineMetrics::OnEnd(const std::string& reason,
                          const RequestTimes& times,
                          int32_t num_prompt_tokens,
                          int32_t num_completion_tokens) {
  ended_.at(reason).Add(1);
  e2e_.Observe(times.e2e_s);
  if (times.queue_s >= 0) queue_.Observe(times.queue_s);
  if (times.prefill_s >= 0) prefill_.Observe(times.prefill_s);
  if (times.decode_s >= 0) decode_.Observe(times.decode_s);
  prompt_tokens_.Add(num_prompt_tokens);
  prompt_length_.Observe(num_prompt_tokens);
  output_length_.Observe(num_completion_tokens);
}

void EngineMetrics::OnStep(const StepPlan& plan, const StepTimes& times, const RankResult& rank0) {
  const StepKind kind = KindOf(plan);
  step_seconds_[kind]->Observe(times.step_s);
  const int rows = plan.num_round_rows() + plan.num_prefill_rows();
  if (rows > 0) step_tokens_.Observe(rows);
  deadline_margin_->Observe(1 - times.step_s / times.deadline_s);
  const double worker_us = rank0.result.compute_us;
  const double waits_us = 1.0 * rank0.collectives_us + rank0.engram_wait_us;
  const auto& parts = part_seconds_[kind];
  parts[kCompute]->Increment(1e-6 * std::max(0.0, worker_us - waits_us));
  parts[kCollectives]->Increment(1e-6 * rank0.collectives_us);
  parts[kEngramWait]->Increment(1e-6 * rank0.engram_wait_us);
  // gRPC both ways, and what the other rank is behind. Results come a little early or late: single
  // differences may be negative, their sum is what counts.
  transport_s_[kind] += times.step_s - 1e-6 * worker_us;
  parts[kTransport]->Increment(std::max(0.0, transport_s_[kind] - parts[kTransport]->Value()));
  parts[kGateway]->Increment(times.gateway_s);
  stage_seconds_[kForward]->Increment(1e-6 * rank0.forward_us);
  stage_seconds_[kSample]->Increment(1e-6 * rank0.sample_us);
  stage_seconds_[kDraft]->Increment(1e-6 * rank0.draft_us);
}

void EngineMetrics::OnEpochEnd(const std::string& cause) {
  epochs_ended_.at(cause)->Increment();
}

void EngineMetrics::OnDivergence() {
  divergences_->Increment();
}

void EngineMetrics::Publish(const EngineStatus& status, const SchedulerCounters& counters) {
  running_.Set(status.num_running);
  waiting_.Set(status.num_waiting);
  const double pages = status.limits.num_pages;
  kv_usage_.Set(pages > 0 ? status.pages_used / pages : 0);
  pages_used_->Set(status.pages_used);
  pages_total_->Set(pages);
  preemptions_.RaiseTo(static_cast<double>(counters.num_preemptions));
  generation_tokens_.RaiseTo(static_cast<double>(counters.num_generated));
  draft_rounds_.RaiseTo(static_cast<double>(counters.num_draft_rounds));
  drafted_.RaiseTo(static_cast<double>(counters.num_drafted));
  accepted_.RaiseTo(static_cast<double>(counters.num_accepted));
  for (size_t j = 0; j < accepted_at_.size(); ++j) {
    accepted_at_[j].RaiseTo(static_cast<double>(counters.accepted_at[j]));
  }
  const auto raise = [](prometheus::Counter* counter, uint64_t value) {
    const double missing = static_cast<double>(value) - counter->Value();
    if (missing > 0) counter->Increment(missing);
  };
  raise(run_ahead_, counters.num_run_ahead);
  raise(dropped_tokens_, counters.num_dropped);
  epoch_->Set(static_cast<double>(status.epoch));
  for (const auto& [name, gauge] : states_) {
    gauge->Set(name == EngineStateName(status.state) ? 1 : 0);
  }
  PublishWorkers(status);
}

void EngineMetrics::PublishWorkers(const EngineStatus& status) {
  for (size_t rank = workers_.size(); rank < status.workers.size(); ++rank) {
    const prometheus::Labels labels = {{"rank", absl::StrCat(rank)}};
    workers_.push_back(
        {&metrics_.Gauge("dsv_heartbeat_age_seconds", "Since a worker was last heard.", labels),
         &metrics_.Gauge("dsv_engram_requests", "Requests of a worker to its row service.", labels),
         &metrics_.Gauge("dsv_engram_errors", "Failed requests of a worker to its row service.",
                         labels),
         {}});
  }
  for (size_t rank = 0; rank < status.workers.size(); ++rank) {
    const WorkerStatus& worker = status.workers[rank];
    WorkerGauges& gauges = workers_[rank];
    gauges.heartbeat_age->Set(worker.heartbeat_age_s);
    gauges.engram_requests->Set(static_cast<double>(worker.engram.num_requests));
    gauges.engram_errors->Set(static_cast<double>(worker.engram.num_errors));
    for (const auto& [name, bytes] : worker.memory_bytes) {
      prometheus::Gauge*& gauge = gauges.memory_bytes[name];
      if (gauge == nullptr) {
        gauge = &metrics_.Gauge("dsv_memory_bytes", "Memory of a worker by class.",
                                {{"rank", absl::StrCat(rank)}, {"class", name}});
      }
      gauge->Set(static_cast<double>(bytes));
    }
  }
}

}  // namespace twinspark::gateway
