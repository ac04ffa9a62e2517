// The EXL3 product kernel: decode tiles in registers and multiply them with 1 to 96 rows. One kernel
// serves single linears, groups of linears and both halves of the mixture of experts, for few rows
// and for chunks; exl3_gemm_cuda.h states the order of accumulation that all of them share.
//
// A block is 8 consumer warps and one producer warp. A task is 128 outputs (a Hadamard block) x up to
// 96 rows x one segment of the inputs (or all segments). The producer streams trellis rows (and
// rotated inputs, unless the block rotates its own) through a ring of shared memory with bulk copies,
// running ahead into the next task. Consumer warp w decodes the tiles of outputs 16w .. 16w+15 and
// feeds them as the A operand, so one instruction serves 8 rows. Segment sums go to scratch; the
// block that arrives last at a counter adds them, rotates the output and resets the counter. No block
// ever waits for another one.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "kernels/device/ptx.cuh"
#include "kernels/exl3/exl3_decode_cuda.cuh"
#include "kernels/exl3/exl3_gemm_cuda.h"
#include "kernels/exl3/exl3_rotate_cuda.cuh"

namespace twinspark::exl3 {

inline constexpr int kMaxStages = 16;
inline constexpr int kZStride = kBlockN + 4;  // floats; keeps fragment stores free of bank conflicts
inline constexpr int kConsumerBarrier = 1;

// Start of shared memory.
struct SharedHeader {
  uint64_t full[kMaxStages];
  uint64_t empty[kMaxStages];
  int32_t last_arrival;
  int32_t num_entries;
};
inline constexpr int kSharedHeaderBytes = 512;
static_assert(sizeof(SharedHeader) <= kSharedHeaderBytes);

// Routing of a few rows, sorted by every block for itself.
struct SharedRoute {
  int32_t id[kMaxSmallSlots];
  int32_t order[kMaxSmallSlots];
  int32_t head[kMaxSmallSlots];  // at a sorted position: 1 << 16 | groups where an expert begins
  MoeEntry entry[kMaxSmallSlots];
};

// What one task is; the same arithmetic in producer and consumers.
struct Task {
  int unit;   // linear: block of the launch; experts: block of the matrix
  int tile;   // linear: tile of rows
  int matrix;
  int which;  // gate or up
  int segment_begin, segment_end;
  int num_rows, num_groups;
  int first_row;  // linear: row; experts: sorted position
  int first_group;
  int expert;
  int entry;
};

__device__ __forceinline__ int SegmentBegin(const GemmArgs& args, int s) {
  return args.pairs * s / args.num_segments;
}

__device__ __forceinline__ Task MakeTask(const GemmArgs& args, const MoeEntry* entries, int t) {
  Task task{};
  if (args.whole) {
    task.segment_begin = 0;
    task.segment_end = args.num_segments;
  } else {
    task.segment_begin = t % args.num_segments;
    task.segment_end = task.segment_begin + 1;
    t /= args.num_segments;
  }
  if (args.kind == GemmKind::kLinear) {
    task.tile = t % args.num_tiles;
    task.unit = t / args.num_tiles;
    task.matrix = MatrixOfUnit(args, task.unit);
    task.first_group = task.tile * args.tile_groups;
    task.first_row = task.first_group * kGroupRows;
    task.num_rows = min(args.rows - task.first_row, args.tile_groups * kGroupRows);
  } else {
    if (args.kind == GemmKind::kGateUp) {
      task.which = t & 1;
      t >>= 1;
    }
    task.unit = t % args.num_blocks;
    task.entry = t / args.num_blocks;
    const MoeEntry entry = entries[task.entry];
    task.expert = entry.expert;
    task.first_row = entry.first;
    task.num_rows = entry.count;
    task.first_group = entry.group;
  }
  task.num_groups = (task.num_rows + kGroupRows - 1) / kGroupRows;
  return task;
}

__device__ __forceinline__ int NumTasks(const GemmArgs& args, int num_entries) {
  const int per_unit = args.whole ? 1 : args.num_segments;
  if (args.kind == GemmKind::kLinear) return args.num_units * args.num_tiles * per_unit;
  return num_entries * args.num_blocks * (args.kind == GemmKind::kGateUp ? 2 : 1) * per_unit;
}

// --- producer ---

// Walks the ring stages of a block's tasks in order.
struct StageCursor {
  int task_index;
  int num_tasks;
  Task task;
  int segment, pair, pair_end;
  const uint8_t* weights;  // of the task's first tile row
  int64_t row_bytes;
  const char* b;  // of the task's first group, pair 0

  __device__ bool done() const { return task_index >= num_tasks; }
};

template <int K>
__device__ __forceinline__ void OpenTask(const GemmArgs& args, const MoeEntry* entries, StageCursor& c) {
  if (c.done()) return;
  c.task = MakeTask(args, entries, c.task_index);
  const Task& task = c.task;
  const uint8_t* trellis;
  int block = task.unit;
  int num_blocks = args.num_blocks;
  int64_t group = task.first_group;
  if (args.kind == GemmKind::kLinear) {
    const GemmMatrix& m = args.matrices[task.matrix];
    trellis = m.trellis;
    num_blocks = m.num_blocks;
    block = task.unit - m.first_unit;
    group += static_cast<int64_t>(task.matrix) * args.num_groups;
  } else {
    const MoeExpert& e = args.experts[task.expert];
    trellis = args.kind == GemmKind::kDown ? e.down : (task.which == 0 ? e.gate : e.up);
    group += task.which * args.group_capacity;
  }
  constexpr int kBlockBytes = 8 * kTileBytesPerBit * K;
  c.row_bytes = static_cast<int64_t>(num_blocks) * kBlockBytes;
  c.weights = trellis + static_cast<int64_t>(block) * kBlockBytes;
  c.b = static_cast<const char*>(args.xh) + group * args.pairs * kPairBytes;
  c.segment = task.segment_begin;
  c.pair = SegmentBegin(args, c.segment);
  c.pair_end = SegmentBegin(args, c.segment + 1);
}

template <int K>
__device__ __forceinline__ void NextStage(const GemmArgs& args, const MoeEntry* entries, StageCursor& c) {
  c.pair += args.stage_pairs;
  if (c.pair < c.pair_end) return;
  if (++c.segment < c.task.segment_end) {
    c.pair = SegmentBegin(args, c.segment);
    c.pair_end = SegmentBegin(args, c.segment + 1);
    return;
  }
  c.task_index += static_cast<int>(gridDim.x);
  OpenTask<K>(args, entries, c);
}

template <int K>
__device__ void Produce(const GemmArgs& args,
                        const MoeEntry* entries,
                        int num_tasks,
                        SharedHeader* header,
                        char* ring,
                        bool waited) {
  constexpr uint32_t kBlockBytes = 8 * kTileBytesPerBit * K;
  const int lane = static_cast<int>(threadIdx.x & 31);
  const uint64_t policy = device::EvictFirstPolicy();
  const bool streamed = !args.resident;
  const uint32_t ring_address = device::SharedAddress(ring);

  auto weights = [&](const StageCursor& c, int stage) {
    const int pairs = min(args.stage_pairs, c.pair_end - c.pair);
    const uint32_t full = device::SharedAddress(&header->full[stage]);
    const uint32_t bytes =
        static_cast<uint32_t>(pairs) *
        (2 * kBlockBytes + (streamed ? static_cast<uint32_t>(c.task.num_groups) * kPairBytes : 0));
    if (lane == 0) device::BarrierArriveExpect(full, bytes);
    __syncwarp();
    if (lane < 2 * pairs) {
      const uint32_t to = ring_address + static_cast<uint32_t>(stage * args.stage_bytes) +
                          static_cast<uint32_t>(lane) * kBlockBytes;
      device::BulkCopyEvictFirst(
          to, c.weights + (2 * c.pair + lane) * c.row_bytes, kBlockBytes, full, policy);
    }
  };
  auto inputs = [&](const StageCursor& c, int stage) {
    const int pairs = min(args.stage_pairs, c.pair_end - c.pair);
    const uint32_t full = device::SharedAddress(&header->full[stage]);
    if (lane < c.task.num_groups) {
      const uint32_t to = ring_address + static_cast<uint32_t>(stage * args.stage_bytes) +
                          static_cast<uint32_t>(args.stage_b_offset) +
                          static_cast<uint32_t>(lane * args.stage_pairs) * kPairBytes;
      device::BulkCopy(to,
                       c.b + (static_cast<int64_t>(lane) * args.pairs + c.pair) * kPairBytes,
                       static_cast<uint32_t>(pairs) * kPairBytes,
                       full);
    }
  };

  StageCursor c{};
  c.task_index = static_cast<int>(blockIdx.x);
  c.num_tasks = num_tasks;
  OpenTask<K>(args, entries, c);
  // The first ring's worth of weights does not depend on the previous kernel.
  StageCursor first = c;
  int prologue = 0;
  for (; prologue < args.num_stages && !c.done(); ++prologue) {
    weights(c, prologue);
    NextStage<K>(args, entries, c);
  }
  if (!streamed) {
    first = c;
  } else {
    if (!waited) device::WaitForPrevious();
    for (int i = 0; i < prologue; ++i) {
      inputs(first, i);
      NextStage<K>(args, entries, first);
    }
  }
  int stage = 0;
  uint32_t parity = 0;
  while (!c.done()) {
    device::BarrierWait(device::SharedAddress(&header->empty[stage]), parity);
    weights(c, stage);
    if (streamed) inputs(c, stage);
    NextStage<K>(args, entries, c);
    if (++stage == args.num_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
}

// --- consumers ---

struct Ring {
  int stage = 0;
  uint32_t parity = 0;
};

// One pair of tile rows for all row groups of the task.
template <int K, int kCodebook, int NT>
__device__ __forceinline__ void MultiplyPair(const char* tile,
                                             const char* b,
                                             int b_group_bytes,
                                             const LaneWindow& window,
                                             float (&acc)[NT][4]) {
  constexpr int kBlockBytes = 8 * kTileBytesPerBit * K;
  const TileWords<K> even = LoadTile<K>(tile, window);
  const TileWords<K> odd = LoadTile<K>(tile + kBlockBytes, window);
  uint32_t a0[4], a1[4];
  DecodeTile<K, kCodebook>(even, window.shift, a0);
  DecodeTile<K, kCodebook>(odd, window.shift, a1);
#pragma unroll
  for (int g = 0; g < NT; ++g) {
    const uint4 x = *reinterpret_cast<const uint4*>(b + g * b_group_bytes);
    device::MmaF16(acc[g], a0, x.x, x.y);
    device::MmaF16(acc[g], a1, x.z, x.w);
  }
}

// Multiplies one task. Leaves the sums in acc: of the only segment, or of all of them.
template <int K, int kCodebook, int NT>
__device__ __forceinline__ void MultiplyTask(const GemmArgs& args,
                                             const Task& task,
                                             SharedHeader* header,
                                             const char* ring_base,
                                             const char* resident_b,
                                             float4* totals,
                                             const LaneWindow& window,
                                             Ring& ring,
                                             float (&acc)[NT][4]) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int task_begin = SegmentBegin(args, task.segment_begin);
  const int resident_pairs = SegmentBegin(args, task.segment_end) - task_begin;
  const int b_group_bytes = (args.resident ? resident_pairs : args.stage_pairs) * kPairBytes;
  for (int segment = task.segment_begin; segment < task.segment_end; ++segment) {
    const int end = SegmentBegin(args, segment + 1);
#pragma unroll
    for (int g = 0; g < NT; ++g) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[g][i] = 0.0f;
    }
    for (int pair = SegmentBegin(args, segment); pair < end; pair += args.stage_pairs) {
      const int pairs = min(args.stage_pairs, end - pair);
      const char* stage = ring_base + ring.stage * args.stage_bytes;
      const char* tile = stage + warp * (kTileBytesPerBit * K);
      const char* b = (args.resident ? resident_b + (pair - task_begin) * kPairBytes
                                     : stage + args.stage_b_offset) +
                      lane * 16;
      device::BarrierWait(device::SharedAddress(&header->full[ring.stage]), ring.parity);
#pragma unroll 2
      for (int i = 0; i < pairs; ++i) {
        MultiplyPair<K, kCodebook, NT>(tile + i * (2 * 8 * kTileBytesPerBit * K),
                                       b + i * kPairBytes,
                                       b_group_bytes,
                                       window,
                                       acc);
      }
      __syncwarp();
      if (lane == 0) device::BarrierArrive(device::SharedAddress(&header->empty[ring.stage]));
      if (++ring.stage == args.num_stages) {
        ring.stage = 0;
        ring.parity ^= 1;
      }
    }
    if (task.segment_end - task.segment_begin == 1) return;
    float4* mine = totals + threadIdx.x;
    const bool is_first = segment == task.segment_begin;
    const bool is_last = segment + 1 == task.segment_end;
#pragma unroll
    for (int g = 0; g < NT; ++g) {
      if (!is_first) {
        const float4 t = mine[g * kConsumerThreads];
        acc[g][0] = t.x + acc[g][0];
        acc[g][1] = t.y + acc[g][1];
        acc[g][2] = t.z + acc[g][2];
        acc[g][3] = t.w + acc[g][3];
      }
      if (!is_last) {
        mine[g * kConsumerThreads] = make_float4(acc[g][0], acc[g][1], acc[g][2], acc[g][3]);
      }
    }
  }
}

// Offset of a row's sums of one segment inside `partial`.
__device__ __forceinline__ int64_t PartialOffset(
    const GemmArgs& args, const Task& task, int row, int which, int num_partials) {
  int64_t index;
  if (args.kind == GemmKind::kLinear) {
    index = static_cast<int64_t>(task.unit) * args.rows + row;
  } else {
    index = (static_cast<int64_t>(row) * args.num_blocks + task.unit) * 2 + which;
  }
  return index * num_partials * kBlockN;
}

// Puts fragments into rows of 128 outputs: row r of the task goes to dst(r) (null: nowhere).
template <int NT, class RowAddress>
__device__ __forceinline__ void StoreFragments(const float (&acc)[NT][4],
                                               int num_rows,
                                               RowAddress row_address) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int col = warp * 16 + lane / 4;
#pragma unroll
  for (int g = 0; g < NT; ++g) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = g * kGroupRows + 2 * (lane & 3) + i;
      if (row < num_rows) {
        float* out = row_address(row);
        out[col] = acc[g][i];
        out[col + 8] = acc[g][2 + i];
      }
    }
  }
}

// Activation of one row of one block of experts, rotated as the input of the down matrix.
__device__ __forceinline__ void FinishGateUpRow(
    const GemmArgs& args, const Task& task, int row, float4 gate_z, float4 up_z, int lane) {
  const MoeExpert& e = args.experts[task.expert];
  const int col = task.unit * kBlockN + 4 * lane;
  const float4 g4 = RotateOutput(gate_z, LoadHalf4(e.gate_svh, col), lane);
  const float4 u4 = RotateOutput(up_z, LoadHalf4(e.up_svh, col), lane);
  float g[4] = {g4.x, g4.y, g4.z, g4.w};
  float u[4] = {u4.x, u4.y, u4.z, u4.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (args.round_gate_up) {
      g[i] = RoundBf16(g[i]);
      u[i] = RoundBf16(u[i]);
    }
    const float clamped_gate = fminf(g[i], args.limit);
    const float clamped_up = fminf(fmaxf(u[i], -args.limit), args.limit);
    g[i] = clamped_gate / (1.0f + __expf(-clamped_gate)) * clamped_up;
    if (args.round_activation) g[i] = RoundBf16(g[i]);
  }
  const uint2 words =
      RotateInput(make_float4(g[0], g[1], g[2], g[3]), LoadHalf4(e.down_suh, col), lane, false);
  const int group = task.first_group + row / kGroupRows;
  uint32_t* out = static_cast<uint32_t*>(args.xh_down) +
                  (static_cast<int64_t>(group) * args.down_pairs + task.unit * 4 + lane / 8) * 128 +
                  FragmentWord(lane, row % kGroupRows);
  out[0] = words.x;
  out[4] = words.y;
}

// Adds the experts of every row, ascending ids, then the shared expert; 128 columns of `unit`.
__device__ __forceinline__ void CombineRow(
    const GemmArgs& args, const GemmMatrix& output, int unit, int row, int lane) {
  const int32_t* ids = args.ids + static_cast<int64_t>(row) * args.num_chosen;
  const int col = unit * kBlockN + 4 * lane;
  float4 sum = make_float4(0, 0, 0, 0);
  for (int rank = 0; rank < args.num_chosen; ++rank) {
    int chosen = 0;
    for (int j = 0; j < args.num_chosen; ++j) {
      int smaller = 0;
      for (int i = 0; i < args.num_chosen; ++i) {
        smaller += ids[i] < ids[j] || (ids[i] == ids[j] && i < j);
      }
      if (smaller == rank) chosen = j;
    }
    const int64_t slot = static_cast<int64_t>(row) * args.num_chosen + chosen;
    const float w = args.weights[slot];
    const float4 v = __ldcg(reinterpret_cast<const float4*>(
        args.slot_out + slot * args.num_blocks * kBlockN + col));
    sum.x = __fadd_rn(sum.x, __fmul_rn(w, v.x));
    sum.y = __fadd_rn(sum.y, __fmul_rn(w, v.y));
    sum.z = __fadd_rn(sum.z, __fmul_rn(w, v.z));
    sum.w = __fadd_rn(sum.w, __fmul_rn(w, v.w));
  }
  if (args.shared_out != nullptr) {
    const float4 s = *reinterpret_cast<const float4*>(
        static_cast<const float*>(args.shared_out) + row * args.shared_stride + col);
    sum = make_float4(sum.x + s.x, sum.y + s.y, sum.z + s.z, sum.w + s.w);
  }
  char* out = static_cast<char*>(output.y) +
              static_cast<int64_t>(row) * output.y_stride * (args.y_type == kTypeF32 ? 4 : 2);
  StoreRow4(out, args.y_type, col, output.y_cols, sum);
}

// True in every consumer thread of the block that arrives last of `expected` at the counter; then
// everything the others wrote before arriving is visible.
__device__ __forceinline__ bool ArriveLast(uint32_t* counter, uint32_t expected, SharedHeader* header) {
  __threadfence();
  device::NamedBarrier(kConsumerBarrier, kConsumerThreads);
  if (threadIdx.x == 0) {
    const bool last = atomicAdd(counter, 1u) == expected - 1;
    if (last) *counter = 0;
    header->last_arrival = last;
    __threadfence();
  }
  device::NamedBarrier(kConsumerBarrier, kConsumerThreads);
  return header->last_arrival != 0;
}

template <int NT>
__device__ void FinishTask(const GemmArgs& args,
                           const Task& task,
                           SharedHeader* header,
                           const int32_t* order,
                           int num_entries,
                           float* z,
                           const float (&acc)[NT][4]) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int num_partials = args.whole ? 1 : args.num_segments;

  if (args.kind == GemmKind::kGateUp || !args.whole) {
    const int segment = args.whole ? 0 : task.segment_begin;
    StoreFragments<NT>(acc, task.num_rows, [&](int row) {
      return args.partial +
             PartialOffset(args, task, task.first_row + row, task.which, num_partials) +
             segment * kBlockN;
    });
    if (args.external_finish) return;
  }

  if (args.kind == GemmKind::kGateUp) {
    uint32_t* counter = args.counters + task.entry * args.num_blocks + task.unit;
    if (!ArriveLast(counter, static_cast<uint32_t>(2 * num_partials), header)) return;
    for (int row = warp; row < task.num_rows; row += kConsumerWarps) {
      const float* first =
          args.partial + PartialOffset(args, task, task.first_row + row, 0, num_partials);
      const float4 gate = SumSegments(first, num_partials, lane);
      const float4 up = SumSegments(first + num_partials * kBlockN, num_partials, lane);
      FinishGateUpRow(args, task, row, gate, up, lane);
    }
    return;
  }

  if (args.whole) {
    device::NamedBarrier(kConsumerBarrier, kConsumerThreads);  // z is free (it overlaps totals)
    StoreFragments<NT>(acc, task.num_rows, [&](int row) { return z + row * kZStride; });
    device::NamedBarrier(kConsumerBarrier, kConsumerThreads);
    for (int row = warp; row < task.num_rows; row += kConsumerWarps) {
      const float4 v = *reinterpret_cast<const float4*>(z + row * kZStride + 4 * lane);
      if (args.kind == GemmKind::kLinear) {
        const GemmMatrix& m = args.matrices[task.matrix];
        FinishLinearRow(args, m, task.unit - m.first_unit, task.first_row + row, v, lane);
      } else {
        const int col = task.unit * kBlockN + 4 * lane;
        const float4 out =
            RotateOutput(v, LoadHalf4(args.experts[task.expert].down_svh, col), lane);
        const int64_t slot = order[task.first_row + row];
        *reinterpret_cast<float4*>(args.slot_out + slot * args.num_blocks * kBlockN + col) = out;
      }
    }
    if (args.kind == GemmKind::kDown && args.small) {
      if (!ArriveLast(args.counters + task.unit, static_cast<uint32_t>(num_entries), header)) return;
      for (int row = warp; row < args.rows; row += kConsumerWarps) {
        CombineRow(args, args.matrices[0], task.unit, row, lane);
      }
    }
    return;
  }

  // Linear, one segment.
  uint32_t* counter = args.counters + task.unit * args.num_tiles + task.tile;
  if (!ArriveLast(counter, static_cast<uint32_t>(args.num_segments), header)) return;
  const GemmMatrix& m = args.matrices[task.matrix];
  for (int row = warp; row < task.num_rows; row += kConsumerWarps) {
    const float* first =
        args.partial + PartialOffset(args, task, task.first_row + row, 0, num_partials);
    const float4 v = SumSegments(first, num_partials, lane);
    FinishLinearRow(args, m, task.unit - m.first_unit, task.first_row + row, v, lane);
  }
}

// Rotates the task's own input into shared memory: rows x the 128-blocks its segments touch.
__device__ __forceinline__ void RotateResident(const GemmArgs& args,
                                               const Task& task,
                                               const int32_t* order,
                                               uint32_t* resident) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int begin = SegmentBegin(args, task.segment_begin);
  const int end = SegmentBegin(args, task.segment_end);
  const int first_block = begin / 4;
  const int num_blocks = (end + 3) / 4 - first_block;
  const GemmMatrix& input = args.matrices[args.kind == GemmKind::kLinear ? task.matrix : 0];
  const void* suh = input.suh;
  if (args.kind == GemmKind::kGateUp) {
    const MoeExpert& e = args.experts[task.expert];
    suh = task.which == 0 ? e.gate_suh : e.up_suh;
  }
  const int num_jobs = num_blocks * task.num_rows;
  for (int job = warp; job < num_jobs; job += kConsumerWarps) {
    const int row = job / num_blocks;
    const int block = first_block + job - row * num_blocks;
    int64_t source = task.first_row + row;
    if (args.kind == GemmKind::kGateUp) source = order[source] / args.num_chosen;
    const int col = block * kBlockN + 4 * lane;
    const float4 x = LoadRow4(
        RowPointer(input.x, args.x_type, input.x_stride, source), args.x_type, col, input.x_cols);
    const uint2 words = RotateInput(x, LoadHalf4(suh, col), lane, args.rounding_upstream != 0);
    const int pair = block * 4 + lane / 8;
    if (pair >= begin && pair < end) {
      uint32_t* out = resident + ((row / kGroupRows) * (end - begin) + pair - begin) * 128 +
                      FragmentWord(lane, row % kGroupRows);
      out[0] = words.x;
      out[4] = words.y;
    }
  }
}

template <int K, int kCodebook, int NT>
__device__ __forceinline__ void RunTask(const GemmArgs& args,
                                        const Task& task,
                                        SharedHeader* header,
                                        char* shared,
                                        const int32_t* order,
                                        int num_entries,
                                        const LaneWindow& window,
                                        Ring& ring) {
  float acc[NT][4];
  float* z = reinterpret_cast<float*>(shared + args.z_offset);
  MultiplyTask<K, kCodebook, NT>(args,
                                 task,
                                 header,
                                 shared + kSharedHeaderBytes,
                                 shared + args.resident_offset,
                                 reinterpret_cast<float4*>(z),
                                 window,
                                 ring,
                                 acc);
  FinishTask<NT>(args, task, header, order, num_entries, z, acc);
}

template <int K, int kCodebook>
__device__ void Consume(const GemmArgs& args,
                        const MoeEntry* entries,
                        const int32_t* order,
                        int num_entries,
                        int num_tasks,
                        SharedHeader* header,
                        char* shared) {
  const LaneWindow window = MakeLaneWindow<K>(static_cast<int>(threadIdx.x & 31));
  Ring ring;
  for (int t = static_cast<int>(blockIdx.x); t < num_tasks; t += static_cast<int>(gridDim.x)) {
    const Task task = MakeTask(args, entries, t);
    if (args.resident) {
      device::NamedBarrier(kConsumerBarrier, kConsumerThreads);
      RotateResident(
          args, task, order, reinterpret_cast<uint32_t*>(shared + args.resident_offset));
      device::NamedBarrier(kConsumerBarrier, kConsumerThreads);
    }
    auto run = [&]<int NT>() {
      RunTask<K, kCodebook, NT>(args, task, header, shared, order, num_entries, window, ring);
    };
    const int groups = task.num_groups;
    if constexpr (kCodebook == kCodebookMul1) {
      if (groups <= 1) {
        run.template operator()<1>();
      } else if (groups <= 2) {
        run.template operator()<2>();
      } else if (groups <= 3) {
        run.template operator()<3>();
      } else if (groups <= 4) {
        run.template operator()<4>();
      } else if (groups <= 6) {
        run.template operator()<6>();
      } else if (groups <= 8) {
        run.template operator()<8>();
      } else {
        run.template operator()<12>();
      }
    } else if (groups <= 1) {  // the rarer codebooks are compiled for fewer sizes
      run.template operator()<1>();
    } else if (groups <= 4) {
      run.template operator()<4>();
    } else {
      run.template operator()<12>();
    }
  }
}

// Sorts the (row, expert) slots of a few rows by expert; all threads of the block.
__device__ __forceinline__ void SortRoute(const GemmArgs& args, SharedHeader* header, SharedRoute* route) {
  const int n = args.rows * args.num_chosen;
  const int tid = static_cast<int>(threadIdx.x);
  for (int i = tid; i < n; i += kGemmThreads) {
    route->id[i] = args.ids[i];
    route->head[i] = 0;
  }
  if (tid == 0) header->num_entries = 0;
  __syncthreads();
  for (int i = tid; i < n; i += kGemmThreads) {
    const int id = route->id[i];
    int less = 0, before = 0, equal = 0;
    for (int j = 0; j < n; ++j) {
      const int other = route->id[j];
      less += other < id;
      equal += other == id;
      before += other == id && j < i;
    }
    route->order[less + before] = i;
    if (before == 0) route->head[less] = 1 << 16 | equal;
  }
  __syncthreads();
  for (int p = tid; p < n; p += kGemmThreads) {
    const int head = route->head[p];
    if (head == 0) continue;
    int rank = 0, group = 0;
    for (int j = 0; j < p; ++j) {
      const int other = route->head[j];
      rank += other >> 16;
      group += ((other & 0xffff) + kGroupRows - 1) / kGroupRows;
    }
    route->entry[rank] = MoeEntry{route->id[route->order[p]], p, head & 0xffff, group};
    atomicAdd(&header->num_entries, 1);
  }
  __syncthreads();
}

template <int K, int kCodebook>
__global__ void __launch_bounds__(kGemmThreads, 2)
    Exl3GemmKernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(128) char shared[];
  SharedHeader* header = reinterpret_cast<SharedHeader*>(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.num_stages; ++i) {
      device::BarrierInit(device::SharedAddress(&header->full[i]), 1);
      device::BarrierInit(device::SharedAddress(&header->empty[i]), kConsumerWarps);
    }
    device::FenceBarrierInit();
  }
  // Routing is made before the previous kernel for the down half, but by it for gate and up.
  const bool waits_first = args.kind == GemmKind::kGateUp;
  if (waits_first) device::WaitForPrevious();
  const MoeEntry* entries = args.entries;
  const int32_t* order = args.order;
  int num_entries = 0;
  if (args.kind != GemmKind::kLinear) {
    if (args.small) {
      SharedRoute* route = reinterpret_cast<SharedRoute*>(shared + args.route_offset);
      SortRoute(args, header, route);
      entries = route->entry;
      order = route->order;
      num_entries = header->num_entries;
    } else {
      num_entries = *args.num_entries;
    }
  }
  __syncthreads();
  const int num_tasks = NumTasks(args, num_entries);
  if (threadIdx.x >= kConsumerThreads) {
    Produce<K>(args, entries, num_tasks, header, shared + kSharedHeaderBytes, waits_first);
  } else {
    if (!waits_first) device::WaitForPrevious();
    device::LaunchNext();
    Consume<K, kCodebook>(args, entries, order, num_entries, num_tasks, header, shared);
  }
}

template <int K, int kCodebook>
int LaunchGemm(const GemmArgs& args, int grid, size_t shared_bytes, void* stream) {
  auto* kernel = &Exl3GemmKernel<K, kCodebook>;
  // Cheap, idempotent and per device, so it is simply repeated.
  cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return static_cast<int>(error);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(kGemmThreads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, args));
}

template <int K>
GemmLauncher PickCodebook(int codebook) {
  switch (codebook) {
    case kCodebook3Inst: return &LaunchGemm<K, kCodebook3Inst>;
    case kCodebookMcg: return &LaunchGemm<K, kCodebookMcg>;
    case kCodebookMul1: return &LaunchGemm<K, kCodebookMul1>;
    default: return nullptr;
  }
}

}  // namespace twinspark::exl3
