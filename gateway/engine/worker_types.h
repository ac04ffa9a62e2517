// What the gateway and one shard worker tell each other outside the log of ops, as plain structs:
// the wire format stops at worker_client.cc. Source: protocol specification 2.
#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "gateway/engine/engine_status.h"
#include "gateway/scheduler/scheduler.h"
#include "gateway/scheduler/step_plan.h"

namespace twinspark::gateway {

struct WorkerHello {
  std::string build;
  uint32_t protocol_version = 0;
  std::string host;
  std::string backend;                    // "cpu", "cuda"
  std::vector<std::string> simd_targets;  // best first; empty on GPUs
  std::string device_name;
  std::string state;
  std::string weights_digest;  // empty: none resident
};

// ConfigureRequest, but for the rank.
struct GroupConfig {
  uint64_t epoch = 0;
  int world = 1;
  std::vector<std::string> group_endpoints;  // answers of PrepareGroup, in rank order
  std::string group_secret;
  std::string model_dir;
  std::string engram_dir;
  std::string expected_config_digest;   // empty: report only
  std::string expected_weights_digest;  // empty: report only
  std::string simd_target;
  EpochLimits wanted;                         // 0: the worker's default
  std::vector<std::string> engram_endpoints;  // by rank
  int64_t gateway_silence_ms = 0;             // after which a worker ends the epoch; 0: its default
  bool reload_weights = false;                // the ranks diverged: resident weights may be damaged
};

struct ConfigureProgress {
  std::string state;
  std::string phase;
  uint64_t bytes_done = 0;
  uint64_t bytes_total = 0;
  std::string current_file;
  double gb_per_second = 0;
  double eta_seconds = 0;
};

struct CostEntry {
  bool is_prefill = false;
  int rows = 0;
  double ms = 0;
};

struct WorkerReady {
  std::string build;
  std::string config_digest;
  std::string weights_digest;
  std::string replicated_digest;
  std::string own_slices_digest;
  bool warm = false;
  EpochLimits granted;
  std::vector<CostEntry> costs;
  std::vector<std::pair<std::string, uint64_t>> memory_bytes;
  RowServiceStatus engram;
  double load_seconds = 0;
};

// One rank's answer to one op.
struct RankResult {
  absl::Status status;
  uint64_t digest = 0;
  StepResult result;  // sequences: of rank 0 only
  // Parts of result.compute_us.
  uint32_t engram_wait_us = 0;
  uint32_t forward_us = 0;
  uint32_t collectives_us = 0;
  uint32_t sample_us = 0;
  uint32_t draft_us = 0;
};

}  // namespace twinspark::gateway
