// Launches of a call with few rows (moe_few_cuda.cu).
#pragma once

#include "kernels/cuda/workspace_cuda.h"
#include "kernels/moe/moe_cuda.h"

namespace twinspark {

// Rows that fit one call of few rows; part of no result.
bool IsMoeFew(const MoeCudaParams& params, int rows);

size_t MoeFewWorkspaceBytes(const MoeCudaParams& params,
                            int rows,
                            int gate_up_segments,
                            int down_segments);

// `gate_up_segments`, `down_segments`: the cuts, as in every path.
CudaStatus RunMoeFew(const MoeCudaParams& params,
                     int gate_up_segments,
                     int down_segments,
                     const CudaDevice& device,
                     const CudaWorkspace& workspace,
                     void* stream);

}  // namespace twinspark
