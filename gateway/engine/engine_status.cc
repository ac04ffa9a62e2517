#include "gateway/engine/engine_status.h"

#include <boost/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace twinspark::gateway {
namespace {

namespace json = boost::json;

// Boost.JSON writes 24.0 as 2.4E1. Here numbers are for people too: no exponents, three decimals at
// most, none where there is no fraction.
void AppendNumber(double value, std::string* out) {
  std::string text = absl::StrFormat("%.3f", value);
  text.erase(text.find_last_not_of('0') + 1);
  if (text.back() == '.') text.pop_back();
  out->append(text == "-0" ? "0" : text);
}

void AppendJson(const json::value& value, std::string* out) {
  if (const json::object* object = value.if_object()) {
    out->push_back('{');
    for (const json::key_value_pair& member : *object) {
      if (out->back() != '{') out->push_back(',');
      absl::StrAppend(out, json::serialize(json::string(member.key())), ":");
      AppendJson(member.value(), out);
    }
    out->push_back('}');
  } else if (const json::array* array = value.if_array()) {
    out->push_back('[');
    for (const json::value& item : *array) {
      if (out->back() != '[') out->push_back(',');
      AppendJson(item, out);
    }
    out->push_back(']');
  } else if (const double* number = value.if_double()) {
    AppendNumber(*number, out);
  } else {
    out->append(json::serialize(value));
  }
}

std::string Text(const json::object& root) {
  std::string out;
  AppendJson(root, &out);
  return out;
}

json::object RowServiceJson(const RowServiceStatus& row_service) {
  return {{"endpoint", row_service.endpoint},
          {"transport", row_service.transport},
          {"tier", row_service.tier},
          {"state", row_service.state},
          {"requests", row_service.num_requests},
          {"errors", row_service.num_errors},
          {"overloaded", row_service.is_overloaded},
          {"last_error", row_service.last_error}};
}

json::object WorkerJson(const WorkerStatus& worker) {
  json::object memory;
  for (const auto& [name, bytes] : worker.memory_bytes)
    memory[name] = bytes;
  return {{"rank", worker.rank},
          {"endpoint", worker.endpoint},
          {"state", worker.state},
          {"host", worker.host},
          {"build", worker.build_id},
          {"backend", worker.backend},
          {"weights_digest", worker.weights_digest},
          {"phase", worker.phase},
          {"progress", worker.progress},
          {"epoch", worker.epoch},
          {"last_op_id", worker.last_op_id},
          {"last_op_age_s", worker.last_op_age_s},
          {"heartbeat_age_s", worker.heartbeat_age_s},
          {"slots_used", worker.slots_used},
          {"pages_used", worker.pages_used},
          {"memory_bytes", std::move(memory)},
          {"last_error", worker.last_error},
          {"last_reason", worker.last_reason},
          {"engram", RowServiceJson(worker.engram)}};
}

json::object LimitsJson(const EngineLimits& limits) {
  return {{"slots", limits.num_slots},
          {"pages", limits.num_pages},
          {"page_tokens", limits.page_tokens},
          {"max_context", limits.max_context},
          {"max_output_default", limits.max_output_default},
          {"max_queue", limits.max_queue},
          {"drafts", limits.num_drafts}};
}

}  // namespace

const char* EngineStateName(EngineState state) {
  switch (state) {
    case EngineState::kBooting:
      return "BOOTING";
    case EngineState::kReady:
      return "READY";
    case EngineState::kDraining:
      return "DRAINING";
    case EngineState::kRecovering:
      return "RECOVERING";
    case EngineState::kFailed:
      return "FAILED";
  }
  return "UNKNOWN";
}

std::string EngineStatusJson(const EngineStatus& status) {
  json::array workers;
  for (const WorkerStatus& worker : status.workers)
    workers.push_back(WorkerJson(worker));
  json::array not_enforced;
  for (const std::string& what : status.not_enforced)
    not_enforced.push_back(json::string(what));
  const double acceptance = status.num_drafted == 0 ? 0
                                                    : static_cast<double>(status.num_accepted) /
                                                          static_cast<double>(status.num_drafted);
  const json::object root = {
      {"state", EngineStateName(status.state)},
      {"reason", status.reason},
      {"since_s", status.state_age_s},
      {"uptime_s", status.uptime_s},
      {"build", status.build_id},
      {"model", status.model_id},
      {"epoch", status.epoch},
      {"config_digest", status.config_digest},
      {"weights_digest", status.weights_digest},
      {"limits", LimitsJson(status.limits)},
      {"requests",
       {{"running", status.num_running},
        {"waiting", status.num_waiting},
        {"prefilling", status.num_prefilling}}},
      {"slots", {{"used", status.num_running}, {"total", status.limits.num_slots}}},
      {"pages", {{"used", status.pages_used}, {"total", status.limits.num_pages}}},
      {"drafts",
       {{"verified", status.num_drafted},
        {"accepted", status.num_accepted},
        {"acceptance", acceptance}}},
      {"ops", status.num_ops},
      {"rounds", status.num_rounds},
      {"preemptions", status.num_preemptions},
      {"epochs_ended", status.num_epochs_ended},
      {"divergences", status.num_divergences},
      {"last_epoch_end", status.last_epoch_end},
      {"not_enforced", std::move(not_enforced)},
      {"workers", std::move(workers)}};
  return Text(root);
}

std::string EngineHealthJson(const EngineStatus& status) {
  return Text({{"status", status.ready() ? "ok" : "unavailable"},
               {"state", EngineStateName(status.state)},
               {"epoch", status.epoch},
               {"reason", status.reason},
               {"since_s", status.state_age_s}});
}

}  // namespace twinspark::gateway
