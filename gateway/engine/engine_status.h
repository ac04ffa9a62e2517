// What the gateway knows about itself, its workers and their row services at one moment: the body
// of /status, and the state and reason behind /health and /ready (operations.md 5.6 of the
// specification). Plain values; made by the engine, read by gateway/openai. /metrics is separate:
// the registry of common/metrics.h.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace twinspark::gateway {

enum class EngineState {
  kBooting,     // no epoch has been ready yet
  kReady,       // serving
  kDraining,    // SIGTERM: running streams end, new ones are refused
  kRecovering,  // an epoch ended; the next one is being set up
  kFailed,      // will not come back by itself; the process is about to exit
};

// "BOOTING", "READY", ...
const char* EngineStateName(EngineState state);

// Limits of the running epoch (zeros before the first one).
struct EngineLimits {
  int32_t num_slots = 0;
  int32_t num_pages = 0;
  int32_t page_tokens = 64;
  int32_t max_context = 0;  // prompt + output of one request
  int32_t max_output_default = 0;
  int32_t max_queue = 0;
  int32_t num_drafts = 0;  // server default of k; 0 when the model has no drafter
  int32_t vocab_size = 0;  // of the model
};

struct RowServiceStatus {
  std::string endpoint;
  std::string transport;  // "shm", "grpc", or empty while unknown
  std::string tier;       // "native", "packed", ...
  std::string state;
  std::string hash_digest;  // of token map and hash parameters: equal on all ranks
  std::string last_error;
  uint64_t num_requests = 0;
  uint64_t num_errors = 0;
  bool is_overloaded = false;  // its bulk reads (long prompts) wait too long
};

struct WorkerStatus {
  int32_t rank = 0;
  std::string endpoint;
  std::string state;  // the worker's word (IDLE, LOADING, ...), or "UNREACHABLE"
  std::string host;
  std::string build_id;
  std::string backend;
  std::string weights_digest;
  std::string phase;  // of a load: current file, bytes, ETA; else empty
  double progress = 0.0;
  uint64_t epoch = 0;
  uint64_t last_op_id = 0;
  double last_op_age_s = 0.0;
  double heartbeat_age_s = 0.0;  // since the last sign of life
  int32_t slots_used = 0;
  int32_t pages_used = 0;
  std::vector<std::pair<std::string, uint64_t>> memory_bytes;  // memory plan, class by class
  std::string last_error;                                      // of the last call to it
  std::string last_reason;  // why its last Configure failed: kept until it is ready, gone or not
  RowServiceStatus engram;
};

struct EngineStatus {
  EngineState state = EngineState::kBooting;
  std::string reason;      // why not ready: one line, names who is missing; empty when ready
  double state_age_s = 0;  // since the state was entered
  double uptime_s = 0;
  uint64_t epoch = 0;
  std::string build_id;
  std::string model_id;
  std::string config_digest;
  std::string weights_digest;
  EngineLimits limits;

  int32_t num_running = 0;  // sequences with a slot
  int32_t num_waiting = 0;  // queued
  int32_t num_prefilling = 0;
  int32_t pages_used = 0;

  uint64_t num_ops = 0;
  uint64_t num_rounds = 0;
  uint64_t num_drafted = 0;
  uint64_t num_accepted = 0;
  uint64_t num_preemptions = 0;
  uint64_t num_epochs_ended = 0;
  uint64_t num_divergences = 0;
  std::string last_epoch_end;  // reason of the last end of an epoch

  std::vector<std::string> not_enforced;  // what requests may ask and this build does not enforce
  std::vector<WorkerStatus> workers;

  // True while /live is 200: the engine thread turned within 5 s.
  bool alive = true;
  // True while a completion may be submitted (/health 200).
  bool ready() const { return state == EngineState::kReady; }
};

// The body of /status: one JSON object.
std::string EngineStatusJson(const EngineStatus& status);

// The body of /health and /ready: {"status", "state", "epoch", "reason", "since_s"}.
std::string EngineHealthJson(const EngineStatus& status);

}  // namespace twinspark::gateway
