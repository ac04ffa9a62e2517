// The activation buffers of a step, allocated once for the largest step. Element type "A" below is
// the numerics option: bf16, or f32 where nothing is rounded. Names are those of model
// specification section 3. T = rows of the step, d = hidden, C = streams.
#pragma once

#include <cstdint>
#include <vector>

#include "common/model_config.h"
#include "kernels/quant/cache_format.h"
#include "kernels/tensor_view.h"
#include "shard_worker/model/model.h"

namespace twinspark {

// A matrix with its memory; views of its first rows are handed to ops.
class Buffer {
 public:
  Buffer() = default;
  Buffer(DType dtype, int64_t rows, int64_t cols)
      : dtype_(dtype),
        rows_(rows),
        cols_(cols),
        bytes_(static_cast<size_t>(rows * cols) * DTypeBytes(dtype)) {}

  TensorView Rows(int64_t count) {
    CHECK_LE(count, rows_);
    return {bytes_.data(), dtype_, count, cols_, cols_};
  }
  TensorView All() { return Rows(rows_); }
  template <class T>
  T* data() {
    return reinterpret_cast<T*>(bytes_.data());
  }
  int64_t max_rows() const { return rows_; }
  int64_t cols() const { return cols_; }
  int64_t bytes() const { return static_cast<int64_t>(bytes_.size()); }

 private:
  DType dtype_ = DType::kF32;
  int64_t rows_ = 0;
  int64_t cols_ = 0;
  std::vector<std::byte> bytes_;
};

// Sizes that bound a step.
struct StepBounds {
  int64_t rows = 0;         // of a forward pass, and of a draft pass
  int64_t logits_rows = 0;  // rows that get logits
  int64_t draft_sequences = 0;
};

struct Workspace {
  Workspace(const ModelConfig& config,
            const ModelOptions& options,
            const StepBounds& bounds,
            CacheFormat window_format);
  int64_t bytes() const;

  // Streams and mixes.
  Buffer streams;                              // A [T, C*d]
  Buffer pre, attn_pre, attn_post, attn_comb;  // f32 [T, C], comb [T, C*C]
  Buffer ffn_post, ffn_comb;
  Buffer x, y;        // A [T, d]: sublayer input and output
  Buffer partial[2];  // f32 [T, d]: partial sums of wo_b and w2

  // Attention. H = this rank's heads, G = its groups.
  Buffer qr;         // A [T, q_lora]
  Buffer q, o;       // A [T, H * head_dim]
  Buffer window;     // A [T, head_dim]
  Buffer step_rows;  // window rows of the step as the ring stores them (bytes)
  Buffer z;          // A [T, G * o_lora]

  // Compressor and indexer.
  Buffer kv_score;                                // f32 [T, 2 * head_dim]
  Buffer latent;                                  // A [T, head_dim]
  Buffer roped_latent;                            // A [T, head_dim]
  Buffer key;                                     // A [T, index_head_dim]
  Buffer index_q;                                 // A [T, index_heads * index_head_dim]
  Buffer index_weights;                           // A [T, index_heads]
  Buffer selected;                                // i32 [T, index_topk]
  Buffer num_selected;                            // i32 [T, 1]
  Buffer candidates;                              // i32 [T, candidate_topk_blocks]
  Buffer num_candidates;                          // i32 [T, 1]
  Buffer rope_plain, rope_compress, rope_groups;  // f32 [T, rope_dim]

  // Experts.
  Buffer route_ids;      // i32 [T, k]
  Buffer route_weights;  // f32 [T, k]

  // Engram.
  Buffer row_codes;   // bytes [T, columns * engram_head_dim], columns in order
  Buffer row_scales;  // bytes [T, columns * engram_head_dim / 32]
  Buffer row_values;  // A [T, columns * engram_head_dim]
  Buffer engram_kv;   // A [T, (C + 1) * d]

  // Head.
  Buffer final_h, final_x;  // A [logits_rows, d]
  Buffer logits_slice;      // f32 [logits_rows, V]
  Buffer logits_slices;     // f32 [world * logits_rows, V], only with world > 1
  Buffer logits;            // f32 [logits_rows, vocab]

  // Draft head.
  Buffer taps;           // A [T, targets * d]
  Buffer main_x;         // A [T, d]
  Buffer draft_logits;   // f32 [sequences, vocab]
  Buffer confidence_in;  // A [sequences, d + markov_rank]
  Buffer confidence;     // f32 [sequences, 1]

 private:
  void AllocateHeads(const ModelConfig& config,
                     const ModelOptions& options,
                     const StepBounds& bounds,
                     DType activation);
};

}  // namespace twinspark
