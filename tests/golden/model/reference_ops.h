// Ops with the rounding places of the published reference code, for comparison with vectors that it
// made in bf16. Ours differ in two places on purpose (model specification 3.7 and 3.10: attention
// probabilities are relative to the final maximum, expert outputs stay f32 and are weighted after
// w2). A difference of one rounding in front of a 4-bit quantiser moves whole steps, so single rows
// can leave bounds that were measured with the reference's places. Plain loops, one thread.
#pragma once

#include "kernels/ops/ops.h"

namespace twinspark::golden {

// CpuOps with `attention` and `moe` replaced.
const OpTable& ReferenceRoundingOps();

}  // namespace twinspark::golden
