#include "shard_worker/budget/budget.h"

#include <algorithm>
#include <array>
#include <string_view>

#include "absl/strings/match.h"

#include "common/limits.h"
#include "common/string_view.h"

namespace twinspark {
namespace {

enum Part : size_t {
  kRouted,
  kShared,
  kAttention,
  kRouter,
  kHyperNorms,
  kEngramWkv,
  kEmbedding,
  kHead,
  kDraftExperts,
  kDraftRest,
  kVision,
  kNumParts,
};
constexpr std::array<const char*, kNumParts> kPartNames = {"routed experts",
                                                           "shared experts",
                                                           "attention, compressor, indexer",
                                                           "router",
                                                           "hyper-connections, norms",
                                                           "Engram wkv",
                                                           "embedding",
                                                           "head",
                                                           "draft experts",
                                                           "draft, rest",
                                                           "vision"};

enum class Split { kNone, kOut, kIn, kRows };

bool Has(std::string_view name, std::string_view text) {
  return absl::StrContains(ToAbsl(name), ToAbsl(text));
}
bool Ends(std::string_view name, std::string_view text) {
  return absl::EndsWith(ToAbsl(name), ToAbsl(text));
}

Part PartOf(const InventoryItem& item) {
  const std::string& name = item.name;
  if (name.starts_with("vision.") || name.starts_with("aligner.") || name.starts_with("image_"))
    return kVision;
  if (name.starts_with("embed.")) return kEmbedding;
  if (name.starts_with("head") || name.starts_with("lm_head")) return kHead;
  if (name.starts_with("mtp.")) return Has(name, ".ffn.experts.") ? kDraftExperts : kDraftRest;
  if (Has(name, ".ffn.experts.")) return kRouted;
  if (Has(name, ".shared_experts.")) return kShared;
  if (Has(name, ".engram.wkv")) return kEngramWkv;
  if (Has(name, ".ffn.gate.")) return kRouter;
  if (item.packed() || Ends(name, "weights_proj.weight") || Has(name, ".attn.w") ||
      Has(name, "compressor.w") || Has(name, "indexer.w"))
    return kAttention;
  return kHyperNorms;
}

Split SplitOf(std::string_view name) {
  const bool expert = Has(name, "experts");
  if (expert) return Has(name, ".w2") ? Split::kIn : Split::kOut;
  if (Has(name, ".indexer.")) return Split::kNone;
  if (Has(name, ".wq_b") || Has(name, ".wo_a") || Has(name, ".engram.wkv") ||
      name.starts_with("head") || name.starts_with("lm_head"))
    return Split::kOut;
  if (Has(name, ".wo_b")) return Split::kIn;
  if (name.starts_with("embed.")) return Split::kRows;
  return Split::kNone;
}

bool KitHalves(std::string_view name) {
  return SplitOf(name) != Split::kNone && !Has(name, ".wo_b") && !Has(name, ".engram.wkv");
}

int64_t HeldBytes(const InventoryItem& item, int world) {
  const Split split = SplitOf(item.name);
  if (split == Split::kNone || world == 1) return item.bytes;
  if (!item.packed()) return item.bytes / world;
  const int64_t in_vector = 2 * item.in;
  const int64_t out_vector = 2 * item.out;
  const int64_t trellis = item.in * item.out * item.bits / 8;
  // A wo_a slice is one group: whole groups go to a rank, so its vectors are split with it.
  if (Has(item.name, ".wo_a.slice.")) return item.bytes / world;
  return trellis / world +
         (split == Split::kIn ? in_vector / world + out_vector : in_vector + out_vector / world) +
         4;
}

void Add(BudgetPart& part, const InventoryItem& item, int world) {
  if (item.packed()) {
    ++part.num_matrices;
    part.weights += item.in * item.out;
    part.trellis_bits += item.in * item.out * item.bits;
  } else {
    ++part.num_natives;
  }
  part.total_bytes += item.bytes;
  part.kit_bytes += KitHalves(item.name) ? item.bytes / world : item.bytes;
  part.held_bytes += HeldBytes(item, world);
}

}  // namespace

Budget ComputeBudget(const ModelConfig& config,
                     const std::vector<InventoryItem>& items,
                     int world) {
  Budget budget;
  budget.world = world;
  budget.parts.resize(kNumParts);
  budget.total.name = "total";
  for (size_t i = 0; i < kNumParts; ++i)
    budget.parts[i].name = kPartNames[i];
  for (const InventoryItem& item : items) {
    Add(budget.parts[PartOf(item)], item, world);
    Add(budget.total, item, world);
    budget.num_tensors += item.packed() ? 4 : 1;
  }
  for (const int source : config.kv_source_layer_ids) {
    const int ratio = config.layers[static_cast<size_t>(source)].ratio;
    const int row = config.head_dim / 2 + config.head_dim / 16;  // E2M1, one E4M3 scale per 16
    const int key =
        config.index_head_dim / 2 + config.index_head_dim / 32;  // E2M1, one E8M0 scale per 32
    budget.kv_bytes_per_token += static_cast<double>(row + key) / ratio;
  }
  const int64_t ring_row = config.head_dim + config.head_dim / 32;  // E4M3, one E8M0 scale per 32
  budget.ring_bytes_per_sequence = (config.num_layers + config.num_draft_stages) *
                                   (config.sliding_window + limits::kWindowSlack) * ring_row;
  return budget;
}

int64_t TokensThatFit(const Budget& budget,
                      int64_t memory_bytes,
                      int64_t reserve_bytes,
                      int slots) {
  const int64_t left = memory_bytes - budget.total.held_bytes - reserve_bytes -
                       slots * budget.ring_bytes_per_sequence;
  if (left <= 0 || budget.kv_bytes_per_token <= 0) return 0;
  return static_cast<int64_t>(static_cast<double>(left) / budget.kv_bytes_per_token) /
         limits::kPageTokens * limits::kPageTokens;
}

}  // namespace twinspark
