// The seam between the worker's machinery (states, streams, log) and what computes: weights, group,
// model, row source. Implementations: ModelBackend (the real one, model_backend.h) and the small
// one of the tests. One compute thread calls the step functions; the others say what they are
// called from.
//
// Life: PrepareGroup > Load (keeps weights when they are the same) > Join > steps > Leave >
// PrepareGroup ...
//
// What a failure means is told by its code. From Load: RESOURCE_EXHAUSTED = not enough memory,
// NOT_FOUND / INVALID_ARGUMENT / DATA_LOSS = wrong or damaged files, INTERNAL = device; these are
// fatal to the process. FAILED_PRECONDITION, UNAVAILABLE, DEADLINE_EXCEEDED, ABORTED, CANCELLED
// (from anything): the attempt or the epoch is over, weights stay. INTERNAL from a step = device
// error, fatal.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "shard_worker/model/step.h"

namespace twinspark {

struct BackendFacts {
  std::string backend;  // "cpu"
  std::string device_name;
  std::vector<std::string> simd_targets;  // best first
  uint64_t memory_total_bytes = 0;
  uint64_t memory_available_bytes = 0;
};

struct GroupLimits {
  int num_slots = 0;
  int num_pages = 0;
  int max_round_rows = 0;
  int max_short_prefill_rows = 0;
  int max_chunk_rows = 0;
  int64_t max_context = 0;

  bool operator==(const GroupLimits&) const = default;
};

// One Configure, as plain values. 0 and "" mean the worker's default.
struct GroupConfig {
  uint64_t epoch = 0;
  int rank = 0;
  int world = 1;
  std::vector<std::string> group_endpoints;
  std::string group_secret;
  std::string model_dir;
  std::string engram_dir;
  std::string expected_config_digest;
  std::string expected_weights_digest;
  std::string simd_target;
  bool f32_numerics = false;
  uint64_t memory_budget_bytes = 0;
  GroupLimits limits;
  std::string engram_endpoint;
  int64_t heartbeat_interval_ms = 0;
  int64_t gateway_silence_ms = 0;
  int64_t engram_wait_ms = 0;
  int64_t communicator_wait_ms = 0;
  bool reload_weights = false;  // whatever is resident
};

struct MemoryUse {
  std::string name;
  uint64_t planned_bytes = 0;
  uint64_t used_bytes = 0;
};

struct ModelFacts {
  std::string name;
  int num_layers = 0;
  int vocab_size = 0;
  int max_drafts = 0;
  int page_tokens = 0;
  int64_t max_position = 0;
  uint64_t kv_bytes_per_page = 0;
  uint64_t bytes_per_slot = 0;
};

struct LoadReport {
  std::string config_digest;
  std::string weights_digest;
  std::string replicated_digest;
  std::string own_slices_digest;
  bool warm = false;
  double load_seconds = 0;
  std::string simd_target;
  std::vector<MemoryUse> memory_plan;
  GroupLimits granted;
  ModelFacts model;
};

struct RowServiceFacts {
  std::string endpoint;
  std::string transport;
  std::string tier;
  std::string table_digest;
  std::string last_error;
  uint64_t errors = 0;
  uint64_t requests = 0;
  bool overloaded = false;  // bulk requests wait too long there
};

// Time of one step shape, measured in Join.
struct StepCost {
  enum class Kind { kRound, kPrefill, kDraft };
  Kind kind = Kind::kRound;
  int rows = 0;
  double microseconds = 0;
};

struct LoadState {
  std::string phase;
  uint64_t bytes_done = 0;
  uint64_t bytes_total = 0;
  int tensors_done = 0;
  int tensors_total = 0;
  std::string current_file;
  double gb_per_second = 0;
  double eta_seconds = 0;
};
using LoadObserver = std::function<void(const LoadState&)>;

// A fault made on purpose (setting TEST_HOOKS).
struct Fault {
  enum class Target { kReplicatedWeight, kCachedRow, kReducedSum };
  Target target = Target::kReplicatedWeight;
  int bit = 0;
  int slot = 0;
};

class WorkerBackend {
 public:
  virtual ~WorkerBackend() = default;

  // Any thread.
  virtual BackendFacts Facts() const = 0;
  virtual std::string ResidentWeightsDigest() const = 0;  // "" when none are
  virtual std::string ResidentConfigDigest() const = 0;
  virtual RowServiceFacts RowService() const = 0;
  // Called by the idle tick, every 100 ms or so, one thread: an error when the row service of this
  // epoch is gone, although no step has asked it for anything.
  virtual absl::Status CheckRowService() { return absl::OkStatus(); }
  // Layers done in the running step: what heartbeats carry as progress.
  virtual int LayersDone() const = 0;
  // Makes a Join or step in progress, and later ones of this epoch, fail soon.
  virtual void Abort() = 0;

  // Configuring thread, never during steps.
  virtual absl::StatusOr<std::string> PrepareGroup(uint64_t epoch, int rank, int world) = 0;
  virtual absl::StatusOr<LoadReport> Load(const GroupConfig& config,
                                          const LoadObserver& observer) = 0;
  virtual absl::StatusOr<std::vector<StepCost>> Join(const GroupConfig& config,
                                                     const LoadReport& report) = 0;
  virtual void Leave() = 0;   // ends the epoch here; weights stay
  virtual void Unload() = 0;  // gives the weights back

  // Compute thread, between Join and Leave.
  virtual absl::Status Open(const OpenSequence& open) = 0;
  virtual absl::Status SetSampling(int slot, const SamplingParams& sampling) = 0;
  virtual absl::Status MapPages(int slot, std::span<const PageMapping> pages) = 0;
  virtual absl::Status Truncate(int slot, int64_t length) = 0;
  virtual absl::Status Close(int slot) = 0;
  virtual absl::Status SetMask(int32_t mask_id, std::span<const uint8_t> bits) = 0;
  virtual absl::StatusOr<StepResult> RunStep(const StepPlan& plan) = 0;
  virtual int64_t CommittedLength(int slot) const = 0;
  virtual int SlotsInUse() const = 0;
  virtual int PagesInUse() const = 0;
  // Returns what was flipped, in words.
  virtual absl::StatusOr<std::string> Inject(const Fault& fault) = 0;
};

}  // namespace twinspark
