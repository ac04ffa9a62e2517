// Routed experts of one layer in one call, 1 to 8,192 rows: routing ids in, weighted sum out.
//
//   out[t] = round(sum over e, ascending, of w[t, e] * (w2_e a_e[t]) + shared[t])
//   a_e = silu(min(g, limit)) * clamp(u, -limit, limit),  g = w1_e x,  u = w3_e x
//
// A row's bits do not depend on the number of rows, the path (few rows or chunk), the other rows or
// how many of them share an expert: every product follows exl3_gemm_cuda.h, and the experts of a
// row are added in ascending id. No host read, no wait between blocks, no state between calls,
// so calls are capturable and independent on several streams (one workspace each). Model spec 3.10,
// "Ours".
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/workspace_cuda.h"
#include "kernels/exl3/exl3_gemm_cuda.h"

namespace twinspark {

// Which product kernel a call runs on; the bits are the same.
enum class MoePath : int32_t {
  kAuto,       // by shape and device
  kFragments,  // mma.sync, every device
  kWarpgroups  // wgmma where it can run (compute capability 9.0), chunks only
};

struct MoeCudaParams {
  int32_t rows = 0;
  int32_t d = 0;      // width of x and out, a multiple of 128
  int32_t inner = 0;  // intermediate width on this rank, a multiple of 128
  int32_t num_experts = 0;
  int32_t num_chosen = 0;
  int32_t gate_up_bits = 0, down_bits = 0;  // K; one for all experts of a layer
  int32_t codebook = 2;
  float limit = 0;
  bool round_gate_up = true;                 // w1 x and w3 x to bf16
  bool round_activation = true;              // a to bf16
  const exl3::MoeExpert* experts = nullptr;  // device [num_experts]
  const int32_t* ids = nullptr;    // device [rows, num_chosen], 0..num_experts-1, distinct in a row
  const float* weights = nullptr;  // device [rows, num_chosen]
  const void* x = nullptr;         // device [rows, d]
  int64_t x_stride = 0;
  int32_t x_type = exl3::kTypeBf16;
  const float* shared_out = nullptr;  // device [rows, d] or null: added last
  int64_t shared_stride = 0;
  void* out = nullptr;  // device [rows, d]
  int64_t out_stride = 0;
  int32_t out_type = exl3::kTypeF32;
  MoePath path = MoePath::kAuto;  // another value only to compare paths
};

inline constexpr int kMaxMoeRows = 8192;
inline constexpr int kMaxMoeSmallRows = 24;  // above, a call is a chunk

// Workspace of a call with up to `rows` rows. A chunk larger than its workspace allows is run in
// slices, so `rows` may be less than the largest call (its bits do not change, its experts are read
// once per slice).
size_t MoeCudaWorkspaceBytes(const MoeCudaParams& params, int rows);

CudaStatus MoeCuda(const MoeCudaParams& params,
                   const CudaDevice& device,
                   const CudaWorkspace& workspace,
                   void* stream);

}  // namespace twinspark
