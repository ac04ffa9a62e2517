#include "shard_worker/budget/inventory.h"

#include <map>

#include <boost/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

#include "common/safetensors.h"
#include "common/status_macros.h"

namespace twinspark {
namespace {

constexpr int64_t kF32 = 4;
constexpr int64_t kBf16 = 2;
constexpr int64_t kF16 = 2;

int64_t PackedBytes(int64_t in, int64_t out, int bits) {
  return in * out * bits / 8 + 2 * in + 2 * out + 4;
}

// Collects items; remembers the first matrix that the map does not know.
class Builder {
 public:
  explicit Builder(const KMap& map) : map_(map) {}

  void Matrix(const std::string& name, int64_t in, int64_t out) {
    const int bits = map_.BitsOf(name);
    if (bits == 0 && unknown_.empty()) unknown_ = name;
    items_.push_back({name, in, out, bits, PackedBytes(in, out, bits)});
  }
  void Native(const std::string& name, int64_t elements, int64_t element_bytes) {
    items_.push_back({name, 0, 0, 0, elements * element_bytes});
  }

  absl::StatusOr<std::vector<InventoryItem>> Finish() && {
    if (!unknown_.empty())
      return absl::InvalidArgumentError(absl::StrCat("the K map says nothing of ", unknown_));
    return std::move(items_);
  }

 private:
  const KMap& map_;
  std::vector<InventoryItem> items_;
  std::string unknown_;
};

void AddExpert(Builder& b, const std::string& prefix, const ModelConfig& c) {
  b.Matrix(prefix + ".w1", c.hidden_size, c.moe_intermediate_size);
  b.Matrix(prefix + ".w3", c.hidden_size, c.moe_intermediate_size);
  b.Matrix(prefix + ".w2", c.moe_intermediate_size, c.hidden_size);
}

// What a backbone block and a draft stage share.
void AddBlock(Builder& b, const std::string& p, const ModelConfig& c, int num_experts) {
  const int64_t d = c.hidden_size;
  const int64_t mixes = (2 + c.hc_mult) * c.hc_mult;
  for (const char* site : {"attn", "ffn"}) {
    b.Native(absl::StrCat(p, ".", site, "_norm.weight"), d, kBf16);
    b.Native(absl::StrCat(p, ".hc_", site, "_fn"), mixes * c.hc_mult * d, kF32);
    b.Native(absl::StrCat(p, ".hc_", site, "_base"), mixes, kF32);
    b.Native(absl::StrCat(p, ".hc_", site, "_scale"), 3, kF32);
  }
  const std::string a = p + ".attn";
  b.Matrix(a + ".wq_a", d, c.q_lora_rank);
  b.Matrix(a + ".wkv", d, c.head_dim);
  b.Matrix(a + ".wq_b", c.q_lora_rank, int64_t{c.num_heads} * c.head_dim);
  for (int g = 0; g < c.o_groups; ++g) {
    b.Matrix(absl::StrCat(a, ".wo_a.slice.", g), int64_t{c.num_heads} * c.head_dim / c.o_groups,
             c.o_lora_rank);
  }
  b.Matrix(a + ".wo_b", int64_t{c.o_groups} * c.o_lora_rank, d);
  b.Native(a + ".q_norm.weight", c.q_lora_rank, kBf16);
  b.Native(a + ".kv_norm.weight", c.head_dim, kBf16);
  b.Native(a + ".attn_sink", c.num_heads, kF32);
  b.Native(p + ".ffn.gate.weight", num_experts * d, kF16);
  b.Native(p + ".ffn.gate.bias", num_experts, kF32);
  for (int e = 0; e < num_experts; ++e)
    AddExpert(b, absl::StrCat(p, ".ffn.experts.", e), c);
  AddExpert(b, p + ".ffn.shared_experts", c);
}

void AddBackboneExtras(Builder& b,
                       const std::string& p,
                       const ModelConfig& c,
                       const LayerTopology& layer) {
  const int64_t d = c.hidden_size;
  const std::string a = p + ".attn";
  if (layer.owns_kv) {
    b.Matrix(a + ".compressor.wkv", d, c.head_dim);
    if (layer.ratio > 1) b.Matrix(a + ".compressor.wgate", d, c.head_dim);
    b.Native(a + ".compressor.norm.weight", c.head_dim, kBf16);
    b.Matrix(a + ".indexer.wk", c.head_dim, c.index_head_dim);
    b.Native(a + ".indexer.k_norm.weight", c.index_head_dim, kBf16);
  }
  if (layer.owns_index) {
    b.Matrix(a + ".indexer.wq_b", c.q_lora_rank, int64_t{c.index_num_heads} * c.index_head_dim);
    b.Native(a + ".indexer.weights_proj.weight", c.index_num_heads * d, kF16);
  }
  if (layer.engram_module >= 0) {
    b.Matrix(p + ".engram.wkv", int64_t{c.engram_num_columns()} * c.engram_head_dim,
             (c.hc_mult + 1) * d);
    b.Native(p + ".engram.q_weight", c.hc_mult * d, kF32);
    b.Native(p + ".engram.k_weight", c.hc_mult * d, kF32);
  }
}

void AddDraftExtras(Builder& b, const ModelConfig& c) {
  const int64_t d = c.hidden_size;
  const std::string last = absl::StrCat("mtp.", c.num_draft_stages - 1);
  b.Matrix("mtp.0.main_proj", d * static_cast<int64_t>(c.draft_target_layer_ids.size()), d);
  b.Native("mtp.0.main_norm.weight", d, kBf16);
  b.Native(last + ".norm.weight", d, kBf16);
  b.Native(last + ".markov_head.embed.weight", int64_t{c.vocab_size} * c.draft_markov_rank, kBf16);
  b.Native(last + ".markov_head.head.weight", int64_t{c.vocab_size} * c.draft_markov_rank, kF16);
  b.Native(last + ".confidence_head.proj.weight", d + c.draft_markov_rank, kF16);
}

void AddVision(Builder& b, const VisionShape& v, int64_t d) {
  if (v.num_layers == 0) return;
  const int64_t h = v.hidden;
  b.Native("vision.patch_embed.proj.weight", h * 3 * v.patch * v.patch, kBf16);
  b.Native("vision.patch_embed.proj.bias", h, kBf16);
  for (int i = 0; i < v.num_layers; ++i) {
    const std::string p = absl::StrCat("vision.blocks.", i);
    b.Native(p + ".norm1.weight", h, kBf16);
    b.Native(p + ".norm2.weight", h, kBf16);
    b.Native(p + ".attn.wqkv.weight", 3 * h * h, kBf16);
    b.Native(p + ".attn.wqkv.bias", 3 * h, kBf16);
    b.Native(p + ".attn.wo.weight", h * h, kBf16);
    b.Native(p + ".attn.wo.bias", h, kBf16);
    b.Native(p + ".mlp.w1.weight", 2 * h * v.intermediate, kBf16);
    b.Native(p + ".mlp.w2.weight", h * v.intermediate, kBf16);
  }
  b.Native("vision.norm.weight", h, kBf16);
  b.Native("aligner.w1.weight", d * h * v.downsample * v.downsample, kBf16);
  b.Native("aligner.w1.bias", d, kBf16);
  b.Native("aligner.w2.weight", d * d, kBf16);
  b.Native("aligner.w2.bias", d, kBf16);
  for (const char* name : {"image_start", "image_end", "image_newline"})
    b.Native(name, d, kBf16);
}

}  // namespace

absl::StatusOr<VisionShape> ParseVisionShape(const std::string& config_json) {
  boost::system::error_code error;
  const boost::json::value json = boost::json::parse(config_json, error);
  if (error) return absl::InvalidArgumentError(absl::StrCat("config.json: ", error.message()));
  VisionShape vision;
  const boost::json::value* object = json.find_pointer("/vision_config", error);
  if (object == nullptr || !object->is_object()) return vision;
  for (const auto& [key, field] : std::initializer_list<std::pair<const char*, int*>>{
           {"num_hidden_layers", &vision.num_layers},
           {"hidden_size", &vision.hidden},
           {"intermediate_size", &vision.intermediate},
           {"patch_size", &vision.patch},
           {"downsample_ratio", &vision.downsample}}) {
    const boost::json::value* value = object->as_object().if_contains(key);
    if (value == nullptr || !value->is_int64() || value->as_int64() < 0 ||
        value->as_int64() > 1 << 20) {
      return absl::InvalidArgumentError(
          absl::StrCat("config.json: vision_config.", key, " is missing or no size"));
    }
    *field = static_cast<int>(value->as_int64());
  }
  return vision;
}

absl::StatusOr<std::vector<InventoryItem>> InventoryFromKMap(const ModelConfig& config,
                                                             const VisionShape& vision,
                                                             const KMap& map) {
  Builder b(map);
  const int64_t d = config.hidden_size;
  b.Native("embed.weight", config.vocab_size * d, kBf16);
  b.Native("norm.weight", d, kBf16);
  b.Matrix("head", d, config.vocab_size);
  for (int layer = 0; layer < config.num_layers; ++layer) {
    const std::string p = absl::StrCat("layers.", layer);
    AddBlock(b, p, config, config.num_experts);
    AddBackboneExtras(b, p, config, config.layers[static_cast<size_t>(layer)]);
  }
  for (int stage = 0; stage < config.num_draft_stages; ++stage)
    AddBlock(b, absl::StrCat("mtp.", stage), config, config.draft_num_experts);
  if (config.num_draft_stages > 0) AddDraftExtras(b, config);
  AddVision(b, vision, d);
  return std::move(b).Finish();
}

absl::StatusOr<std::vector<InventoryItem>> InventoryFromHeaders(const std::string& dir) {
  ASSIGN_OR_RETURN(const std::unique_ptr<Checkpoint> checkpoint, Checkpoint::Open(dir));
  std::map<std::string, InventoryItem> items;
  for (const std::string& name : checkpoint->names()) {
    if (absl::StrContains(name, ".engram.embed.")) continue;
    const StoredTensor& tensor = *checkpoint->Find(name);
    std::string key = name;
    for (const char* suffix : {".trellis", ".suh", ".svh", ".mul1", ".mcg"}) {
      if (absl::EndsWith(name, suffix)) key = std::string(absl::StripSuffix(name, suffix));
    }
    InventoryItem& item = items[key];
    item.name = key;
    item.bytes += tensor.bytes;
    if (absl::EndsWith(name, ".trellis")) {
      if (tensor.shape.size() != 3 || tensor.shape[2] % 16 != 0 || tensor.shape[2] < 16 ||
          tensor.shape[2] > 128) {
        return absl::InvalidArgumentError(
            absl::StrCat(name, " has shape ", tensor.ShapeText(),
                         ", expected [in/16, out/16, 16*K] with K from 1 to 8"));
      }
      item.in = tensor.shape[0] * 16;
      item.out = tensor.shape[1] * 16;
      item.bits = static_cast<int>(tensor.shape[2] / 16);
    }
  }
  std::vector<InventoryItem> list;
  for (auto& [key, item] : items)
    list.push_back(std::move(item));
  return list;
}

std::vector<std::string> CompareWithKMap(const std::vector<InventoryItem>& items, const KMap& map) {
  std::vector<std::string> differences;
  for (const InventoryItem& item : items) {
    if (!item.packed()) continue;
    const int said = map.BitsOf(item.name);
    if (said != item.bits)
      differences.push_back(absl::StrCat(item.name, ": the map says K = ", said,
                                         ", the trellis has K = ", item.bits));
  }
  return differences;
}

}  // namespace twinspark
