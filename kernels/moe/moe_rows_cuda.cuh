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

}  // namespace twinspark::exl3
