// See memory_plan.h.
#include "shard_worker/backend/memory_plan.h"

#include <algorithm>
#include <limits>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "common/limits.h"
#include "kernels/quant/cache_format.h"

namespace twinspark {
namespace {

constexpr int kDefaultSlots = 8;
// 131,072 tokens: enough for every laptop-sized trial; a GPU's gateway asks for what its memory
// leaves.
constexpr int kDefaultPages = 2048;
// Rows of one forward. Longer chunks are cut inside the model, which bounds the workspace.
constexpr int64_t kStepRows = limits::kMaxShortPrefillRows;

uint64_t PageBytes(const ModelConfig& config, Numerics numerics) {
  const bool exact = numerics == Numerics::kF32;
  const int64_t row =
      CacheRowBytes(exact ? CacheFormat::kF32 : CacheFormat::kQ4E4, config.head_dim);
  const int64_t key =
      CacheRowBytes(exact ? CacheFormat::kF32 : CacheFormat::kQ4E8, config.index_head_dim);
  int64_t bytes = 0;
  for (const int source : config.kv_source_layer_ids) {
    const int ratio = std::max(1, config.layers[static_cast<size_t>(source)].ratio);
    bytes += limits::kPageTokens / ratio * (row + key);
  }
  return static_cast<uint64_t>(bytes);
}

uint64_t SlotBytes(const ModelConfig& config, Numerics numerics) {
  const bool exact = numerics == Numerics::kF32;
  const int64_t ring_row =
      CacheRowBytes(exact ? CacheFormat::kF32 : CacheFormat::kQ8, config.head_dim);
  const int64_t rings = config.num_layers + config.num_draft_stages;
  const int64_t ring = (config.sliding_window + limits::kWindowSlack) * ring_row;
  const int64_t carry = 16 * int64_t{8} * config.head_dim;  // 16 rows of kv and gate, f32
  const auto sources = static_cast<int64_t>(config.kv_source_layer_ids.size());
  return static_cast<uint64_t>(rings * ring + sources * carry);
}

// Activations of a step, roughly: residual streams in and out, projections, index scores, logits.
uint64_t WorkspaceBytes(const ModelConfig& config) {
  const int64_t per_row =
      4 * (3 * int64_t{config.hc_mult} * config.hidden_size + 6 * int64_t{config.hidden_size} +
           4 * int64_t{config.num_heads} * config.head_dim +
           2 * int64_t{config.experts_per_token + 1} * config.moe_intermediate_size);
  const int64_t logits = 4 * int64_t{64} * 2 * config.vocab_size;
  return static_cast<uint64_t>(kStepRows * per_row + logits + (int64_t{64} << 20));
}

std::string Gib(uint64_t bytes) {
  return absl::StrFormat("%.2f GiB", static_cast<double>(bytes) / static_cast<double>(1u << 30));
}

int Or(int wanted, int otherwise) {
  return wanted > 0 ? wanted : otherwise;
}

}  // namespace

absl::StatusOr<MemoryPlan> PlanMemory(const ModelConfig& config,
                                      uint64_t weights_bytes,
                                      const MemoryRequest& request) {
  MemoryPlan plan;
  GroupLimits& granted = plan.granted;
  granted.num_slots = Or(request.wanted.num_slots, kDefaultSlots);
  granted.max_round_rows = Or(request.wanted.max_round_rows, limits::kMaxRoundRows);
  granted.max_short_prefill_rows =
      Or(request.wanted.max_short_prefill_rows, limits::kMaxShortPrefillRows);
  granted.max_chunk_rows = Or(request.wanted.max_chunk_rows, limits::kMaxChunkRows);
  granted.max_context = std::min<int64_t>(
      request.wanted.max_context > 0 ? request.wanted.max_context : config.max_position_embeddings,
      config.max_position_embeddings);
  plan.bytes_per_page = PageBytes(config, request.numerics);
  plan.bytes_per_slot = SlotBytes(config, request.numerics);
  plan.weights_bytes = weights_bytes;
  plan.rings_bytes = plan.bytes_per_slot * static_cast<uint64_t>(granted.num_slots);
  plan.workspace_bytes = WorkspaceBytes(config);

  const uint64_t budget =
      request.budget_bytes > 0 ? request.budget_bytes : std::numeric_limits<uint64_t>::max();
  const int64_t pages_per_sequence =
      (granted.max_context + limits::kPageTokens - 1) / limits::kPageTokens;
  const bool pages_given = request.wanted.num_pages > 0;
  int64_t pages = pages_given
                      ? request.wanted.num_pages
                      : std::min<int64_t>(kDefaultPages, granted.num_slots * pages_per_sequence);
  const uint64_t fixed = plan.total_bytes();
  if (!pages_given && plan.bytes_per_page > 0 && fixed < budget) {
    pages = std::min(pages, static_cast<int64_t>((budget - fixed) / plan.bytes_per_page));
  }
  // Less than a page per slot serves nobody.
  pages = std::max<int64_t>(pages, granted.num_slots);
  granted.num_pages = static_cast<int>(pages);
  plan.pages_bytes = plan.bytes_per_page * static_cast<uint64_t>(pages);
  if (plan.total_bytes() > budget) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "not enough memory: need ", Gib(plan.total_bytes()), " (weights ", Gib(plan.weights_bytes),
        ", ", pages, " pages ", Gib(plan.pages_bytes), ", ", granted.num_slots, " slots ",
        Gib(plan.rings_bytes), ", workspace ", Gib(plan.workspace_bytes), "), have ", Gib(budget),
        "; lower KV_PAGES or MAX_NUM_SEQS, raise MEMORY_BUDGET_GIB, or free memory"));
  }
  return plan;
}

absl::StatusOr<MemoryPlan> PlanMemory(const ModelConfig& config,
                                      const Checkpoint& checkpoint,
                                      const MemoryRequest& request) {
  uint64_t bytes = 0;
  for (const std::string& name : checkpoint.names()) {
    if (absl::StrContains(name, ".engram.embed.")) continue;  // the row service has these
    const StoredTensor* tensor = checkpoint.Find(name);
    if (tensor == nullptr) continue;
    uint64_t size = static_cast<uint64_t>(tensor->bytes);
    // 16 bits a weight instead of 2.9 to 6: priced at the smallest.
    if (request.f16_copy && absl::EndsWith(name, ".trellis")) size *= 6;
    bytes += size;
  }
  // Replicated tensors count whole on every rank; the part that is split dominates.
  const uint64_t world = static_cast<uint64_t>(std::max(1, request.world));
  return PlanMemory(config, bytes / world + bytes / 20, request);
}

}  // namespace twinspark
