// See result_writer.h.
#include "shard_worker/service/result_writer.h"

#include <algorithm>
#include <string>

#include "common/build_info.h"

namespace twinspark {
namespace {

uint32_t ToU32(int64_t value) {
  return static_cast<uint32_t>(std::clamp<int64_t>(value, 0, UINT32_MAX));
}

void WriteLogprobs(const TokenLogprobs& token, proto::TokenLogprobs* wire) {
  wire->set_token_id(static_cast<uint32_t>(token.token.id));
  wire->set_logprob(token.token.logprob);
  wire->set_rank(ToU32(token.rank));
  for (const TokenLogprob& top : token.top) {
    wire->add_top_ids(static_cast<uint32_t>(top.id));
    wire->add_top_logprobs(top.logprob);
  }
}

void WriteSequence(const SequenceOutcome& outcome, proto::SequenceResult* wire) {
  const SequenceResult& result = outcome.result;
  wire->set_slot(ToU32(result.slot));
  wire->set_num_accepted(ToU32(result.accepted));
  for (const int32_t id : result.tokens)
    wire->add_tokens(static_cast<uint32_t>(id));
  for (const int32_t id : result.drafts)
    wire->add_draft_ids(static_cast<uint32_t>(id));
  for (const float logit : result.draft_confidences)
    wire->add_draft_confidence_logits(logit);
  wire->set_stop_hit(ToU32(result.stop_index + 1));
  wire->set_non_finite(result.non_finite);
  wire->set_committed_length(ToU32(outcome.committed_length));
  for (const TokenLogprobs& token : result.logprobs)
    WriteLogprobs(token, wire->add_logprobs());
  for (const TokenLogprobs& token : result.prompt_logprobs)
    WriteLogprobs(token, wire->add_prompt_logprobs());
}

void WriteTimings(const OpTimings& timings, proto::Timings* wire) {
  wire->set_queue_us(ToU32(timings.queue_us));
  wire->set_engram_wait_us(ToU32(timings.engram_wait_us));
  wire->set_compute_us(ToU32(timings.compute_us));
  wire->set_collectives_us(ToU32(timings.collectives_us));
  wire->set_sample_us(ToU32(timings.sample_us));
  wire->set_draft_us(ToU32(timings.draft_us));
  wire->set_total_us(ToU32(timings.total_us));
  wire->set_rows(ToU32(timings.rows));
}

void WriteMemory(const std::vector<MemoryUse>& rows,
                 google::protobuf::RepeatedPtrField<proto::MemoryRow>* wire) {
  for (const MemoryUse& row : rows) {
    proto::MemoryRow* out = wire->Add();
    out->set_name(row.name);
    out->set_planned_bytes(row.planned_bytes);
    out->set_used_bytes(row.used_bytes);
  }
}

void WriteRowService(const RowServiceFacts& facts, proto::RowServiceStatus* wire) {
  wire->set_endpoint(facts.endpoint);
  wire->set_transport(facts.transport);
  wire->set_tier(facts.tier);
  wire->set_errors(facts.errors);
  wire->set_requests(facts.requests);
  wire->set_last_error(facts.last_error);
  wire->set_table_digest(facts.table_digest);
  wire->set_overloaded(facts.overloaded);
}

}  // namespace

proto::WorkerState ToWire(WorkerState state) {
  switch (state) {
    case WorkerState::kIdle:
      return proto::WORKER_IDLE;
    case WorkerState::kLoading:
      return proto::WORKER_LOADING;
    case WorkerState::kJoining:
      return proto::WORKER_JOINING;
    case WorkerState::kReady:
      return proto::WORKER_READY;
    case WorkerState::kServing:
      return proto::WORKER_SERVING;
    case WorkerState::kDraining:
      return proto::WORKER_DRAINING;
    case WorkerState::kFailed:
      return proto::WORKER_FAILED;
  }
  return proto::WORKER_STATE_UNSPECIFIED;
}

void WriteOpResult(const OpOutcome& outcome, bool bulky, proto::OpResult* wire) {
  wire->set_op_id(outcome.op_id);
  wire->mutable_status()->set_code(static_cast<uint32_t>(outcome.status.code()));
  wire->mutable_status()->set_message(std::string(outcome.status.message()));
  wire->set_digest(outcome.digest);
  if (!bulky) {
    wire->mutable_timings()->set_total_us(ToU32(outcome.timings.total_us));
    return;
  }
  WriteTimings(outcome.timings, wire->mutable_timings());
  for (const SequenceOutcome& sequence : outcome.round)
    WriteSequence(sequence, wire->add_round());
  for (const SequenceOutcome& sequence : outcome.short_prefill) {
    WriteSequence(sequence, wire->add_short_prefill());
  }
  if (outcome.chunk_slice.has_value()) {
    WriteSequence(*outcome.chunk_slice, wire->mutable_chunk_slice());
  }
}

void WriteHeartbeat(const Heartbeat& heartbeat, proto::WorkerHeartbeat* wire) {
  wire->set_sequence(heartbeat.sequence);
  wire->set_state(ToWire(heartbeat.state));
  wire->set_op_id(heartbeat.op_id);
  wire->set_busy(heartbeat.busy);
  wire->set_layers_done(ToU32(heartbeat.layers_done));
}

void WriteProgress(WorkerState state, const LoadState& load, proto::ConfigureProgress* wire) {
  wire->set_state(ToWire(state));
  wire->set_phase(load.phase);
  wire->set_bytes_done(load.bytes_done);
  wire->set_bytes_total(load.bytes_total);
  wire->set_tensors_done(ToU32(load.tensors_done));
  wire->set_tensors_total(ToU32(load.tensors_total));
  wire->set_current_file(load.current_file);
  wire->set_gb_per_second(load.gb_per_second);
  wire->set_eta_seconds(load.eta_seconds);
}

void WriteLimits(const GroupLimits& limits, proto::Limits* wire) {
  wire->set_num_slots(ToU32(limits.num_slots));
  wire->set_num_pages(ToU32(limits.num_pages));
  wire->set_max_round_rows(ToU32(limits.max_round_rows));
  wire->set_max_short_prefill_rows(ToU32(limits.max_short_prefill_rows));
  wire->set_max_chunk_rows(ToU32(limits.max_chunk_rows));
  wire->set_max_context(ToU32(limits.max_context));
}

void WriteReady(const ReadyReport& report, proto::ConfigureReady* wire) {
  wire->set_build(BuildId());
  wire->set_config_digest(report.load.config_digest);
  wire->set_weights_digest(report.load.weights_digest);
  wire->set_replicated_digest(report.load.replicated_digest);
  wire->set_own_slices_digest(report.load.own_slices_digest);
  wire->set_warm(report.load.warm);
  wire->set_load_seconds(report.load.load_seconds);
  wire->set_simd_target(report.load.simd_target);
  WriteMemory(report.load.memory_plan, wire->mutable_memory_plan());
  WriteLimits(report.load.granted, wire->mutable_granted());
  for (const StepCost& cost : report.costs) {
    proto::CostRow* row = wire->add_cost_table();
    row->set_kind(cost.kind == StepCost::Kind::kRound     ? proto::CostRow::ROUND
                  : cost.kind == StepCost::Kind::kPrefill ? proto::CostRow::PREFILL
                                                          : proto::CostRow::DRAFT);
    row->set_rows(ToU32(cost.rows));
    row->set_microseconds(cost.microseconds);
  }
  WriteRowService(report.row_service, wire->mutable_row_service());
  const ModelFacts& facts = report.load.model;
  proto::ModelFacts* model = wire->mutable_model();
  model->set_name(facts.name);
  model->set_num_layers(ToU32(facts.num_layers));
  model->set_vocab_size(ToU32(facts.vocab_size));
  model->set_max_drafts(ToU32(facts.max_drafts));
  model->set_page_tokens(ToU32(facts.page_tokens));
  model->set_max_position(ToU32(facts.max_position));
  model->set_kv_bytes_per_page(facts.kv_bytes_per_page);
  model->set_bytes_per_slot(facts.bytes_per_slot);
}

void WriteStatus(const WorkerStatus& status, proto::StatusReply* wire) {
  wire->set_state(ToWire(status.state));
  wire->set_epoch(status.epoch);
  wire->set_rank(ToU32(status.rank));
  wire->set_world(ToU32(status.world));
  wire->set_last_op_id(status.last_op_id);
  wire->set_last_op_age_ms(static_cast<uint64_t>(std::max<int64_t>(status.last_op_age_ms, 0)));
  wire->set_ops_executed(status.ops_executed);
  wire->set_slots_in_use(ToU32(status.slots_in_use));
  wire->set_num_slots(ToU32(status.limits.num_slots));
  wire->set_pages_in_use(ToU32(status.pages_in_use));
  wire->set_num_pages(ToU32(status.limits.num_pages));
  WriteMemory(status.memory, wire->mutable_memory());
  for (const OpTimingSummary& timing : status.op_timings) {
    proto::TimingQuantiles* out = wire->add_op_timings();
    out->set_name(timing.name);
    out->set_count(timing.count);
    out->set_p50_us(timing.p50_us);
    out->set_p90_us(timing.p90_us);
    out->set_p99_us(timing.p99_us);
    out->set_max_us(timing.max_us);
  }
  WriteRowService(status.row_service, wire->mutable_row_service());
  WriteProgress(status.state, status.progress, wire->mutable_progress());
  for (const std::string& error : status.errors)
    wire->add_errors(error);
  wire->set_weights_digest(status.weights_digest);
  wire->set_config_digest(status.config_digest);
}

}  // namespace twinspark
