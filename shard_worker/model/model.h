// The model of one rank: weights, sequence state and the arithmetic of a step. Owns no thread, no
// socket, no file after Load. Decides nothing: slots, pages and rows come with the calls.
// Callers: shard_worker/service, and the golden programs. Threading: one thread at a time.
//
// Life: Load > BeginEpoch(communicator, rows) > (OpenSequence, MapPages, RunStep, ...)* >
// BeginEpoch... Weights survive epochs, sequences do not.
//
// Errors: INVALID_ARGUMENT (a plan that does not fit the state: unknown slot, unmapped page, k >
// max), UNAVAILABLE / DEADLINE_EXCEEDED / INTERNAL passed on from the communicator and the row
// source: the epoch is over then, BeginEpoch starts the next one.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "common/model_config.h"
#include "kernels/thread_pool.h"
#include "shard_worker/model/row_source.h"
#include "shard_worker/model/step.h"
#include "shard_worker/parallel/communicator.h"

namespace twinspark {

class Forward;
class ForwardObserver;
struct OpTable;
struct SequenceState;

enum class Numerics : uint8_t {
  kBf16,  // activations rounded where model specification section 3 says; cache quantisers on
  kF32,   // no rounding, quantisers off
};

struct ModelLimits {
  int num_slots = 8;
  int num_pages = 2048;      // physical pages of 64 tokens
  int max_step_rows = 512;   // rows of one forward; longer prefill ranges are cut inside RunStep
  int max_logits_rows = 64;  // rows of one forward that get logits
  int64_t max_context = 0;   // tokens; 0 = max_position_embeddings
};

// What the published code was given and how it rounds, for comparison with vectors that it made in
// bf16; serving leaves all of it off.
struct ReferenceComparison {
  bool bf16_weights = false;     // EXL3 matrices and F16 / F32 natives (not mHC, biases) in bf16
  bool one_sum = false;          // a single rank does not sum the halves of two ranks
  bool whole_experts = false;    // every rank computes all of every expert, nothing is summed
  const OpTable* ops = nullptr;  // other rounding places; null = the backend's
};

struct ModelOptions {
  int rank = 0;
  int world = 1;
  Numerics numerics = Numerics::kBf16;
  ModelLimits limits;
  bool f16_copy = false;  // decode EXL3 once into f16 (exact, faster, 16 bits a weight)
  ReferenceComparison reference;
  std::string engram_dir;  // another directory with the Engram shards, only checked; empty = same
};

struct LoadProgress {
  int64_t bytes_done = 0;
  int64_t bytes_total = 0;
  int tensors_done = 0;
  int tensors_total = 0;
  std::string file;
};
using LoadProgressCallback = std::function<void(const LoadProgress&)>;

struct MemoryPlanEntry {
  std::string part;  // "weights", "pages", "rings", "workspace", ...
  int64_t bytes = 0;
};

// Protocol section 2: what ranks compare before they compute together.
struct ModelDigests {
  uint64_t config = 0;      // model config, world, numerics, limits
  uint64_t weights = 0;     // index file, shard sizes, shard headers
  uint64_t replicated = 0;  // content of tensors that every rank holds whole
  uint64_t slices = 0;      // content of this rank's slices
};

class Model {
 public:
  // `pool` is borrowed and used only inside Load and RunStep. RESOURCE_EXHAUSTED, NOT_FOUND,
  // INVALID_ARGUMENT name file, tensor, expected and found.
  static absl::StatusOr<std::unique_ptr<Model>> Load(
      const std::string& model_dir,
      const ModelOptions& options,
      ThreadPool& pool,
      const LoadProgressCallback& progress = nullptr);
  ~Model();
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  const ModelConfig& config() const;
  const ModelOptions& options() const;
  const ModelDigests& digests() const;
  const std::vector<MemoryPlanEntry>& memory_plan() const;
  bool has_drafts() const;  // false when the checkpoint has no mtp.* tensors
  int max_drafts() const;   // dspark_block_size, or 0
  int tokens_per_page() const { return 64; }

  // Forgets all sequences. Both are borrowed until the next call; their rank and world must be
  // ours.
  absl::Status BeginEpoch(Communicator* communicator, RowSource* rows);

  absl::Status Open(const OpenSequence& open);
  absl::Status SetSampling(int slot, const SamplingParams& sampling);
  absl::Status MapPages(int slot, std::span<const PageMapping> pages);
  // Lowers the committed length (positions whose rows count); the id at `length` stays the anchor.
  absl::Status Truncate(int slot, int64_t length);
  absl::Status Close(int slot);
  // bits: vocab/8 bytes, bit v of byte v/8; a cleared bit forbids the token.
  absl::Status SetMask(int32_t mask_id, std::span<const uint8_t> bits);

  absl::StatusOr<StepResult> RunStep(const StepPlan& plan);

  // Committed length of a slot, or -1 when it is free.
  int64_t CommittedLength(int slot) const;
  int slots_in_use() const;
  int pages_in_use() const;

  // For tests: sees every intermediate tensor of the forward pass (forward_observer.h). Null = off.
  void SetObserver(ForwardObserver* observer);

  // For tests of single blocks.
  Forward& forward();
  const std::vector<SequenceState>& slots() const;

 private:
  class Impl;
  explicit Model(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace twinspark
