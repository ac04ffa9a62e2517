// The weights that one rank holds, in the form the ops read. Names follow model specification 2.2.
// Shapes are given for this rank: H heads, G output groups, I expert width and V vocabulary rows
// are the local shares; d, q_lora, head_dim are whole. Filled by weight_loader.cc, immutable
// afterwards.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/model_config.h"
#include "kernels/gemm/linear.h"
#include "kernels/moe/moe.h"
#include "kernels/tensor_view.h"

namespace twinspark {

// A small native tensor widened to f32 (norms, biases, hyper-connections, router).
struct FloatTensor {
  std::vector<float> values;
  int64_t rows = 0;
  int64_t cols = 0;

  ConstTensorView view() const { return MakeView(values.data(), rows, cols); }
  bool empty() const { return values.empty(); }
};

// A table whose rows are looked up by token id; bf16 stays bf16.
struct EmbeddingTable {
  std::vector<Bf16> bf16;
  std::vector<float> f32;  // used when bf16 is empty
  int64_t rows = 0;
  int64_t cols = 0;

  ConstTensorView view() const {
    return bf16.empty() ? MakeView(f32.data(), rows, cols) : MakeView(bf16.data(), rows, cols);
  }
  bool empty() const { return rows == 0; }
};

struct HyperConnectionWeights {
  FloatTensor fn;     // [2C + C*C, C*d]
  FloatTensor base;   // [1, 2C + C*C]
  FloatTensor scale;  // [1, 3]
};

struct AttentionWeights {
  LinearWeights wq_a;               // d -> q_lora
  FloatTensor q_norm;               // [1, q_lora]
  LinearWeights wq_b;               // q_lora -> H * head_dim
  LinearWeights wkv;                // d -> head_dim
  FloatTensor kv_norm;              // [1, head_dim]
  FloatTensor sink;                 // [1, H]
  std::vector<LinearWeights> wo_a;  // G of them: heads/groups * head_dim -> o_lora
  std::vector<LinearWeights> wo_b;  // partials: G * o_lora / partials -> d each
};

struct CompressorWeights {
  LinearWeights wkv;    // d -> head_dim
  LinearWeights wgate;  // d -> head_dim; empty for ratio 1
  FloatTensor norm;     // [1, head_dim]
  LinearWeights wk;     // indexer.wk: head_dim -> index_head_dim
  FloatTensor k_norm;   // [1, index_head_dim]
};

struct IndexerWeights {
  LinearWeights wq_b;          // q_lora -> index_heads * index_head_dim
  LinearWeights weights_proj;  // d -> index_heads
};

struct EngramWeights {
  LinearWeights wkv;  // columns * engram_head_dim -> (C + 1) * d
  FloatTensor gate;   // [C, d]: q_weight * k_weight
};

struct MoeWeights {
  FloatTensor gate;     // [experts, d]
  FloatTensor bias;     // [1, experts]
  FloatTensor bias_vl;  // [1, experts] or empty
  // Three matrices and the partials of w2 per expert; `experts` and `shared` point into it.
  std::vector<LinearWeights> matrices;
  std::vector<ExpertWeights> experts;
  ExpertWeights shared;
  int num_chosen = 0;
};

// A backbone block or a draft stage.
struct BlockWeights {
  FloatTensor attn_norm;  // [1, d]
  FloatTensor ffn_norm;   // [1, d]
  HyperConnectionWeights hc_attn;
  HyperConnectionWeights hc_ffn;
  AttentionWeights attn;
  std::optional<CompressorWeights> compressor;
  std::optional<IndexerWeights> indexer;
  std::optional<EngramWeights> engram;
  MoeWeights ffn;
};

struct DraftWeights {
  LinearWeights main_proj;  // targets * d -> d
  FloatTensor main_norm;    // [1, d]
  std::vector<BlockWeights> stages;
  FloatTensor norm;               // [1, d], of the last stage
  EmbeddingTable markov_embed;    // [vocab, markov_rank]
  LinearWeights markov_head;      // markov_rank -> vocab (replicated)
  LinearWeights confidence_proj;  // d + markov_rank -> 1
};

struct ModelWeights {
  EmbeddingTable embed;  // [vocab, d], replicated
  std::vector<BlockWeights> blocks;
  FloatTensor norm;    // [1, d]
  LinearWeights head;  // d -> V
  std::optional<DraftWeights> draft;
  int num_partials = 1;  // of wo_b and w2 on this rank
  int64_t bytes = 0;     // as resident
};

}  // namespace twinspark
