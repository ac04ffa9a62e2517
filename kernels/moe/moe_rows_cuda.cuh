// What happens to one row of 128 outputs of gate and up between the two products of an expert. One
// warp, four channels a lane. Device code only.
#pragma once

#include <cstdint>

#include "kernels/exl3/exl3_rotate_cuda.cuh"

namespace twinspark::exl3 {

struct ActivationRule {
  float limit;
  bool round_gate_up, round_activation;  // to bf16
};

// The lane's part of the vectors around the activation.
struct GateUpScales {
  float4 gate_svh, up_svh, down_suh;
};
__device__ __forceinline__ GateUpScales LoadGateUpScales(const MoeExpert& e, int unit, int lane) {
  const int col = unit * kBlockN + 4 * lane;
  return {LoadHalf4(e.gate_svh, col), LoadHalf4(e.up_svh, col), LoadHalf4(e.down_suh, col)};
}

// Sums of the products -> activation, rotated as the input of the down matrix (two words of f16).
__device__ __forceinline__ uint2 ActivateRow(
    const ActivationRule& rule, const GateUpScales& scales, float4 gate_z, float4 up_z, int lane) {
  const float4 g4 = RotateOutput(gate_z, scales.gate_svh, lane);
  const float4 u4 = RotateOutput(up_z, scales.up_svh, lane);
  float g[4] = {g4.x, g4.y, g4.z, g4.w};
  float u[4] = {u4.x, u4.y, u4.z, u4.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (rule.round_gate_up) {
      g[i] = RoundBf16(g[i]);
      u[i] = RoundBf16(u[i]);
    }
    const float clamped_gate = fminf(g[i], rule.limit);
    const float clamped_up = fminf(fmaxf(u[i], -rule.limit), rule.limit);
    g[i] = clamped_gate / (1.0f + __expf(-clamped_gate)) * clamped_up;
    if (rule.round_activation) g[i] = RoundBf16(g[i]);
  }
  return RotateInput(make_float4(g[0], g[1], g[2], g[3]), scales.down_suh, lane, false);
}

// The experts of one row in ascending order of id. Lane j has slot j: its id, weight and rank.
struct RowSlots {
  int id, rank;
  float weight;
};
__device__ __forceinline__ RowSlots
RankSlots(const int32_t* ids, const float* weights, int64_t first, int num_chosen, int lane) {
  RowSlots slots = {0x7fffffff, 0, 0};
  if (lane < num_chosen) {
    slots.id = ids[first + lane];
    slots.weight = weights[first + lane];
  }
  for (int j = 0; j < num_chosen; ++j) {
    const int other = __shfl_sync(0xffffffffu, slots.id, j);
    slots.rank += other < slots.id || (other == slots.id && j < lane);
  }
  return slots;
}
struct RowSlot {
  int slot, expert;
  float weight;
};
__device__ __forceinline__ RowSlot SlotOfRank(const RowSlots& slots,
                                              int rank,
                                              int num_chosen,
                                              int lane) {
  const uint32_t found = __ballot_sync(0xffffffffu, lane < num_chosen && slots.rank == rank);
  const int slot = __ffs(static_cast<int>(found)) - 1;
  return {slot, __shfl_sync(0xffffffffu, slots.id, slot),
          __shfl_sync(0xffffffffu, slots.weight, slot)};
}

// sum + weight * v, rounded twice.
__device__ __forceinline__ float4 AddWeighted(float4 sum, float weight, float4 v) {
  return make_float4(
      __fadd_rn(sum.x, __fmul_rn(weight, v.x)), __fadd_rn(sum.y, __fmul_rn(weight, v.y)),
      __fadd_rn(sum.z, __fmul_rn(weight, v.z)), __fadd_rn(sum.w, __fmul_rn(weight, v.w)));
}

// Adds the shared expert's four columns, if there are any, and stores the row's.
__device__ __forceinline__ void StoreExperts(float4 sum,
                                             const float* shared_out,
                                             int64_t shared_stride,
                                             void* out,
                                             int64_t out_stride,
                                             int out_type,
                                             int row,
                                             int col,
                                             int cols) {
  if (shared_out != nullptr) {
    const float4 s = *reinterpret_cast<const float4*>(shared_out + row * shared_stride + col);
    sum = make_float4(sum.x + s.x, sum.y + s.y, sum.z + s.z, sum.w + s.w);
  }
  char* to = static_cast<char*>(out) +
             static_cast<int64_t>(row) * out_stride * (out_type == kTypeF32 ? 4 : 2);
  StoreRow4(to, out_type, col, cols, sum);
}

}  // namespace twinspark::exl3
