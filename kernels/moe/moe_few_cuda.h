// Arguments of the product kernel of few rows (moe_few_cuda.cuh) and its launch functions, one per
// K. Plain structs, no CUDA types beyond pointers to device memory. The order of accumulation is
// that of exl3_gemm_cuda.h, so the bits are those of every other path.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/exl3/exl3_gemm_cuda.h"

namespace twinspark::exl3 {

// Tasks taken by whoever came, blocks done, tasks taken by every SM.
inline constexpr int kFewDone = 1;
inline constexpr int kFewOwn = 2;
inline constexpr int kFewMaxSms = 510;
inline constexpr int kFewCounters = kFewOwn + kFewMaxSms;

// Experts are numbered by their first sorted position ("position": the rank of a (row, expert) slot
// among all slots, ascending expert, then row). Those that begin before `early_slots` are the early
// ones: gate/up says when they are done, so that what follows can begin with them.
struct MoeFewArgs {
  int32_t down;  // 0: gate and up
  int32_t num_slots, early_slots;
  int32_t pairs, num_segments, num_blocks;
  FastDivisor by_segments, by_blocks;
  uint16_t segment_begin[kMaxSegments + 1];  // in pairs
  int32_t num_stages, stage_bytes, route_offset;
  int32_t row_stride;    // floats from a position's sums to the next one's
  int64_t which_groups;  // 8-row groups of inputs from gate's to up's
  const MoeExpert* experts;
  const int32_t* ids;  // [num_slots]
  const void* xh;      // rotated inputs: [which][position][pairs][512 bytes]
  float* sums;         // [position][block][which][segment][128]
  int32_t num_sms;     // <= kFewMaxSms
  int32_t dealt;       // 1: all tasks are dealt to the SMs; 0: whole rounds are for whoever comes
  uint32_t* counters;  // [kFewCounters], zero before and after
};

// Returns a cudaError_t. `groups`: of the largest task.
using MoeFewLauncher = int (*)(const MoeFewArgs& args, int grid, size_t shared_bytes, void* stream);

// 8-row groups a kernel is compiled for, and blocks that share an SM.
inline constexpr int kFewGroupSizes[] = {1, 3};
inline int FewGroups(int groups) {
  for (int size : kFewGroupSizes) {
    if (groups <= size) return size;
  }
  return kFewGroupSizes[1];
}
constexpr int FewBlocksPerSm(int groups) {
  return groups == 3 ? 3 : 2;
}

// K 1..8, codebook 0..2, groups one of kFewGroupSizes; the rarer codebooks have one size, which
// serves all.
MoeFewLauncher FindMoeFew(int bits, int codebook, int groups);

MoeFewLauncher MoeFewLauncherK1(int codebook, int groups);
MoeFewLauncher MoeFewLauncherK2(int codebook, int groups);
MoeFewLauncher MoeFewLauncherK3(int codebook, int groups);
MoeFewLauncher MoeFewLauncherK4(int codebook, int groups);
MoeFewLauncher MoeFewLauncherK5(int codebook, int groups);
MoeFewLauncher MoeFewLauncherK6(int codebook, int groups);
MoeFewLauncher MoeFewLauncherK7(int codebook, int groups);
MoeFewLauncher MoeFewLauncherK8(int codebook, int groups);

}  // namespace twinspark::exl3
