// The model's shape: what config.json says (model specification 1.1 to 1.4) and what follows from
// it (1.5). Every number of the forward pass comes from here. Reads the nested file of the released
// model (text_config) and refuses values that would change the mathematics: each error names the
// key, the value and what is expected. Plain data, thread-compatible. Callers: shard_worker/model,
// engram_service (the Engram keys), tools.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace twinspark {

// One backbone block, derived (1.5).
struct LayerTopology {
  int ratio = 0;            // 0 = window only, else tokens per compressed row
  int kv_source = -1;       // layer whose compressed rows and index keys this one reads
  int index_source = -1;    // layer whose selection this one uses
  bool owns_kv = false;     // has a compressor and makes index keys
  bool owns_index = false;  // has index queries
  bool makes_candidates = false;
  bool uses_candidates = false;
  int engram_module = -1;  // index into engram_layer_ids
  int draft_tap = -1;      // index into dspark_target_layer_ids
  int source_idx = -1;     // index of kv_source among kv_source_layer_ids
};

struct ModelConfig {
  // Top level.
  int bos_token_id = 0;
  int eos_token_id = 1;
  int pad_token_id = 2;
  int image_token_id = -1;
  std::string quant_method;  // "exl3", "fp8" or empty

  // text_config.
  int vocab_size = 0;
  int hidden_size = 0;
  int moe_intermediate_size = 0;
  int num_layers = 0;
  int num_heads = 0;
  int head_dim = 0;
  int rope_dim = 0;  // the last rope_dim channels are rotated
  int q_lora_rank = 0;
  int o_lora_rank = 0;
  int o_groups = 0;
  float swiglu_limit = 0;
  float rms_norm_eps = 0;
  int64_t max_position_embeddings = 0;
  double rope_theta = 0;
  double compress_rope_theta = 0;
  double yarn_factor = 1;
  double yarn_beta_fast = 32;
  double yarn_beta_slow = 1;
  int64_t yarn_original_max_position = 0;
  int num_experts = 0;
  int experts_per_token = 0;
  float routed_scaling_factor = 1;
  int sliding_window = 0;
  std::vector<int> compress_ratios;  // num_layers + num_draft_stages entries
  std::vector<int> kv_source_layer_ids;
  std::vector<int> index_source_layer_ids;
  int index_num_heads = 0;
  int index_head_dim = 0;
  int index_topk = 0;
  int candidate_source_layer_id = -1;  // negative = off
  int candidate_topk_blocks = 0;
  int candidate_block_size = 0;
  int hc_mult = 0;
  int hc_sinkhorn_iters = 0;
  float hc_eps = 0;

  std::vector<int> engram_layer_ids;
  std::vector<int64_t> engram_num_embeddings;
  int engram_max_ngram_size = 0;
  int64_t engram_vocab_size = 0;
  int engram_num_heads = 0;
  int engram_head_dim = 0;
  int engram_pad_token_id = 0;
  int64_t engram_compressed_vocab_size = 0;

  int num_draft_stages = 0;  // num_nextn_predict_layers
  int draft_block_size = 0;
  int draft_noise_token_id = 0;
  std::vector<int> draft_target_layer_ids;
  int draft_markov_rank = 0;
  int draft_num_experts = 0;
  int draft_experts_per_token = 0;

  std::vector<LayerTopology> layers;  // derived, num_layers entries

  int engram_num_orders() const { return engram_max_ngram_size - 1; }
  int engram_num_columns() const { return engram_num_orders() * engram_num_heads; }
  bool has_candidates() const { return candidate_source_layer_id >= 0; }
};

// Parses the text of a config.json. `origin` names the file in errors.
absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view json, std::string_view origin);

// Reads and parses `dir`/config.json.
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& dir);

// OK when the model may be split over `world` ranks (8.3); else says which size does not divide.
absl::Status CheckTensorParallel(const ModelConfig& config, int world);

}  // namespace twinspark
