// Arguments of the one EXL3 product kernel (exl3_gemm_cuda.cuh) and its launch functions, one per K
// and codebook. Plain structs, no CUDA types beyond pointers to device memory, so that host
// planning code reads without a device compiler. Callers: exl3_linear_cuda.cu and moe/moe_cuda.cu.
//
// Order of accumulation, the same for every number of rows and every path: the inputs are cut into
// `num_segments` contiguous segments (segment_begin, in pairs of 32 channels); inside a segment
// every output is one chain of m16n8k16 tensor instructions with f32 accumulators, starting from 0,
// inputs ascending; the segment sums are added in f32, ascending. Who computes a segment, and how
// many rows share a decoded tile, is scheduling.
#pragma once

#include <cstddef>
#include <cstdint>

namespace twinspark::exl3 {

inline constexpr int kBlockN = 128;     // outputs of one task: a Hadamard block
inline constexpr int kPairK = 32;       // inputs of two tile rows, the unit of the ring
inline constexpr int kGroupRows = 8;    // rows (tokens) of one tensor instruction
inline constexpr int kPairBytes = 512;  // of 8 rows of rotated inputs and kPairK channels
inline constexpr int kMaxMatrices = 8;
inline constexpr int kMaxTileGroups = 12;   // 96 rows share a decoded tile at most
inline constexpr int kMaxSmallSlots = 384;  // (row, expert) pairs that every block sorts by itself

// Pairs of tile rows in one stage of the ring, for kernels of `groups` row groups.
// (as device constants: kStagePairsOf).
constexpr int StagePairs(int groups) {
  return groups > 6 ? 2 : 4;
}

// Pairs of tile rows that a warp keeps in registers when it decodes ahead.
constexpr int KeptPairs(int units, int groups) {
  return units == 1 && groups <= 4 ? 4 : 2;
}

// Whether the kernels for clusters and for tasks in rounds decode ahead.
constexpr bool DecodesAhead(bool clusters, int units, int groups) {
  return units == 2 ? groups == 1 : clusters;
}

// Blocks per SM that the registers of a kernel for `groups` row groups are cut for.
constexpr int BlocksByRegisters(int groups) {
  return groups > 0 ? 2 : 0;
}

// Element types of x and y; the values of the module interface.
inline constexpr int kTypeF32 = 0;
inline constexpr int kTypeBf16 = 1;
inline constexpr int kTypeF16 = 2;

// One matrix in device memory, and its input and output. `trellis` is in the prepared order: for
// every 128 outputs all tile rows, one behind the other (a checkpoint has all outputs of a tile row
// first).
struct GemmMatrix {
  const uint8_t* trellis;      // [n/128, k/16, 8 tiles, 32 K bytes]
  const void* suh;             // f16 [k]
  const void* svh;             // f16 [n]
  const void* bias;            // f16 [n] or null
  const void* x;               // [rows, x_cols]
  void* y;                     // [rows, y_cols]
  int64_t x_stride, y_stride;  // elements
  int32_t x_cols, y_cols;      // <= k, <= n
  int32_t num_blocks;          // n / 128
  int32_t first_unit;          // blocks of the matrices before this one
};

// The three matrices of one expert, in device memory, prepared as above.
struct MoeExpert {
  const uint8_t* gate;
  const uint8_t* up;
  const uint8_t* down;
  const void* gate_suh;
  const void* gate_svh;
  const void* up_suh;
  const void* up_svh;
  const void* down_suh;
  const void* down_svh;
};

// Rows of one expert that one task multiplies: sorted positions [first, first + count).
struct MoeEntry {
  int32_t expert;
  int32_t first;
  int32_t count;
  int32_t group;  // index of the first 8-row group in xh buffers
};

// Division of task numbers by a launch constant: exact while number * divisor < 2^32.
struct FastDivisor {
  uint32_t divisor;
  uint32_t magic;  // ceil(2^32 / divisor); 0 for 1
};
inline FastDivisor MakeDivisor(int divisor) {
  const uint32_t d = static_cast<uint32_t>(divisor);
  return {d, d == 1 ? 0 : static_cast<uint32_t>(((uint64_t{1} << 32) + d - 1) / d)};
}

inline constexpr int kMaxSegments = 40;

enum class GemmKind : int32_t { kLinear, kGateUp, kDown };

struct GemmArgs {
  GemmKind kind;
  int32_t whole;  // 1: a task runs all segments and finishes; 0: one segment, the last one finishes
  int32_t resident;  // 1: blocks rotate their own input into shared memory; 0: rotated input is
                     // streamed
  int32_t external_finish;    // segments: another kernel adds them
  int32_t warpgroup;          // 1: xh as warpgroup instructions read it (exl3_warpgroup_cuda.cuh)
  int32_t rounding_upstream;  // x * suh rounded to f16 too (golden comparison only)
  int32_t pairs;              // k / 32
  int32_t num_segments;
  FastDivisor by_segments, by_tiles, by_blocks;
  uint16_t segment_begin[kMaxSegments + 1];  // in pairs
  int32_t rows;
  int32_t x_type, y_type;
  // Ring in shared memory.
  int32_t num_stages, stage_bytes;
  int32_t resident_offset, z_offset;
  // Stages that may be decoded before the wait; their first pairs stay in registers (KeptPairs),
  // the others in shared memory.
  int32_t ahead_stages, ahead_offset;
  // Linear.
  int32_t num_matrices, num_units, tile_groups, num_tiles, num_groups;
  int32_t task_units = 1;  // blocks of outputs of a task: 1 or 2
  GemmMatrix matrices[kMaxMatrices];
  // Mixture of experts.
  const MoeExpert* experts;
  int32_t num_blocks;  // n / 128 of the stage
  int32_t num_chosen;
  const int32_t* ids;    // [rows, num_chosen]
  const float* weights;  // [rows, num_chosen]
  const MoeEntry* entries;
  const int32_t* num_entries;
  const int32_t* order;    // sorted position -> slot (row * num_chosen + j)
  int64_t group_capacity;  // groups per half of xh (gate, up)
  float limit;
  int32_t round_gate_up, round_activation;  // to bf16
  int32_t down_pairs;                       // inner / 32
  void* xh_down;                            // written by kGateUp, read by kDown
  float* slot_out;                          // [slots, d] f32, written by kDown
  const void* shared_out;                   // f32 [rows, d] to add last, or null
  int64_t shared_stride;
  // Scratch.
  const void* xh;      // rotated input: [matrix or which][group][pairs][512 bytes]
  float* partial;      // segment sums, [.., segment][128]
  uint32_t* counters;  // zero before and after every launch
};

// Launches the kernel of one K and codebook on `stream` (a cudaStream_t) with programmatic
// dependent launch; returns a cudaError_t. `grid` blocks share the tasks.
using GemmLauncher = int (*)(const GemmArgs& args, int grid, size_t shared_bytes, void* stream);

// K 1..8, codebook 0..2, groups one of kGroupSizes; null otherwise. `wide`: four warps of 32
// outputs instead of eight of 16 (half the reads of the inputs; for 6 and 12 groups).
GemmLauncher FindGemm(int bits, int codebook, int groups, bool wide);

GemmLauncher GemmLauncherK1(int codebook, int groups, bool wide);
GemmLauncher GemmLauncherK2(int codebook, int groups, bool wide);
GemmLauncher GemmLauncherK3(int codebook, int groups, bool wide);
GemmLauncher GemmLauncherK4(int codebook, int groups, bool wide);
GemmLauncher GemmLauncherK5(int codebook, int groups, bool wide);
GemmLauncher GemmLauncherK6(int codebook, int groups, bool wide);
GemmLauncher GemmLauncherK7(int codebook, int groups, bool wide);
GemmLauncher GemmLauncherK8(int codebook, int groups, bool wide);

// Kernels for up to 48 rows of linears with mul1: by tasks of one block of outputs, of two (fewer
// rows), of one with warpgroup instructions (compute capability 9.0).
enum class TaskForm : int32_t { kOne, kTwo, kWarpgroup };

// The kernel for tasks in rounds (exl3_few_cuda.cuh), kTwo or kWarpgroup; null otherwise.
GemmLauncher FindFew(int bits, int groups, TaskForm form);

// The kernel for clusters (exl3_cluster_cuda.cuh), kOne or kTwo, or null.
const void* FindClusterKernel(int bits, int groups, TaskForm form);

const void* ClusterKernelK1(int groups);
const void* ClusterKernelK2(int groups);
const void* ClusterKernelK3(int groups);
const void* ClusterKernelK4(int groups);
const void* ClusterKernelK5(int groups);
const void* ClusterKernelK6(int groups);
const void* ClusterKernelK7(int groups);
const void* ClusterKernelK8(int groups);

GemmLauncher FewLauncherK1(int groups, TaskForm form);
GemmLauncher FewLauncherK2(int groups, TaskForm form);
GemmLauncher FewLauncherK3(int groups, TaskForm form);
GemmLauncher FewLauncherK4(int groups, TaskForm form);
GemmLauncher FewLauncherK5(int groups, TaskForm form);
GemmLauncher FewLauncherK6(int groups, TaskForm form);
GemmLauncher FewLauncherK7(int groups, TaskForm form);
GemmLauncher FewLauncherK8(int groups, TaskForm form);
const void* ClusterOfTwoK1(int groups);
const void* ClusterOfTwoK2(int groups);
const void* ClusterOfTwoK3(int groups);
const void* ClusterOfTwoK4(int groups);
const void* ClusterOfTwoK5(int groups);
const void* ClusterOfTwoK6(int groups);
const void* ClusterOfTwoK7(int groups);
const void* ClusterOfTwoK8(int groups);

// 8-row groups a kernel is compiled for; a launch uses the smallest that holds its largest task.
inline constexpr int kGroupSizes[] = {1, 2, 3, 4, 6, 12};
inline int RoundGroups(int groups) {
  for (int size : kGroupSizes) {
    if (groups <= size) return size;
  }
  return kMaxTileGroups;
}

}  // namespace twinspark::exl3
