// Rotary positions on the last rope_dim channels of every vector, interleaved pairs (model
// specification 3.0). Angles are the f32 product position * frequency followed by f32 cos and sin,
// as the reference does it. The table of a step is computed once per frequency set and read by
// every layer, so all rows see the same bits however they are grouped.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/launch.h"
#include "kernels/tensor_view.h"

namespace twinspark {

// rope_dim / 2 frequencies theta^(-2i / rope_dim).
std::vector<float> PlainRopeFrequencies(int rope_dim, float theta);

// The same with YaRN's ramp between interpolated and plain frequencies (no attention factor).
struct YarnParams {
  int rope_dim = 0;
  float theta = 0;
  float factor = 1;  // <= 1: plain frequencies
  float original_max_position = 0;
  float beta_fast = 32;
  float beta_slow = 1;
};
std::vector<float> YarnRopeFrequencies(const YarnParams& params);

// out[t] = cos of all pairs, then sin of all pairs.
struct RopeTableParams {
  const int64_t* positions = nullptr;  // [num_rows]
  const float* frequencies = nullptr;  // [rope_dim / 2]
  TensorView out;                      // [num_rows, rope_dim], kF32
};

struct RopeParams {
  ConstTensorView x;  // [num_rows, num_heads * head_dim], kF32 or kBf16
  int head_dim = 0;
  int rope_dim = 0;       // even, <= head_dim; the last channels of each head
  ConstTensorView table;  // [num_rows, rope_dim], kF32, from RopeTable
  bool inverse = false;
  TensorView out;  // shape of x, kF32 or kBf16; may be x itself
};

void RopeTableCpu(const RopeTableParams& params, const Launch& launch);
void RopeCpu(const RopeParams& params, const Launch& launch);

}  // namespace twinspark
