// The EXL3 product kernel: decode tiles in registers and multiply them with 1 to 96 rows. One
// kernel serves single linears, groups of linears and both halves of the mixture of experts, for
// few rows and for chunks; exl3_gemm_cuda.h states the order of accumulation that all of them
// share.
//
// A block is 8 consumer warps and one producer warp. A task is 128 outputs (a Hadamard block) x up
// to 96 rows x one segment of the inputs (or all segments). The producer streams the block's tile
// rows, which lie one behind the other (Exl3PrepareCuda), and rotated inputs, unless the block
// rotates its own, through a ring of shared memory with bulk copies, one per stage (many small ones
// were the limit of an earlier version), running ahead into the next task. Consumer warp w decodes
// the tiles of outputs 16w .. 16w+15 and feeds them as the A operand, so one instruction serves 8
// rows. Segment sums go to scratch; the block that arrives last at a counter adds them, rotates the
// output and resets the counter. No block ever waits for another one.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "kernels/device/ptx.cuh"
#include "kernels/exl3/exl3_decode_cuda.cuh"
#include "kernels/exl3/exl3_gemm_cuda.h"
#include "kernels/exl3/exl3_resident_cuda.cuh"
#include "kernels/exl3/exl3_rotate_cuda.cuh"

namespace twinspark::exl3 {

inline constexpr int kMaxStages = 8;
inline constexpr int kMaxAheadStages = 4;
inline constexpr int kZStride =
    kBlockN + 4;  // floats; keeps fragment stores free of bank conflicts
inline constexpr int kConsumerBarrier = 1;
// A consumer warp decodes TC columns of tiles (16 TC outputs), so a block whose tasks are U blocks
// of outputs has 8 U / TC of them.
template <int TC, int U = 1>
inline constexpr int kWarps = 8 * U / TC;
template <int TC, int U = 1>
inline constexpr int kConsumers = 32 * kWarps<TC, U>;
template <int NT>
inline constexpr int kStagePairsOf = StagePairs(NT);
template <int NT>
inline constexpr int kBlocksByRegisters = BlocksByRegisters(NT);

// Start of shared memory.
struct SharedHeader {
  uint64_t full[kMaxStages];
  uint64_t empty[kMaxStages];
  uint64_t deferred_from[kMaxStages];  // inputs of the first ring
  uint32_t deferred_bytes[kMaxStages];
  int32_t last_arrival;
};
inline constexpr int kSharedHeaderBytes = 512;
static_assert(sizeof(SharedHeader) <= kSharedHeaderBytes);

// What one task is; the same arithmetic in producer and consumers.
struct Task {
  int unit;  // linear: (first) block of the launch; experts: block of the matrix
  int tile;  // linear: tile of rows
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
  return args.segment_begin[s];
}

// number / divisor, and the remainder in `number`.
__device__ __forceinline__ int Divide(int* number, const FastDivisor& by) {
  const uint32_t n = static_cast<uint32_t>(*number);
  const uint32_t quotient = by.magic == 0 ? n : __umulhi(n, by.magic);
  *number = static_cast<int>(n - quotient * by.divisor);
  return static_cast<int>(quotient);
}

__device__ __forceinline__ Task MakeTask(const GemmArgs& args, const MoeEntry* entries, int t) {
  Task task{};
  if (args.whole) {
    task.segment_begin = 0;
    task.segment_end = args.num_segments;
  } else {
    const int unit = Divide(&t, args.by_segments);
    task.segment_begin = t;
    task.segment_end = t + 1;
    t = unit;
  }
  if (args.kind == GemmKind::kLinear) {
    task.unit = Divide(&t, args.by_tiles) * args.task_units;
    task.tile = t;
    task.matrix = MatrixOfUnit(args, task.unit);
    task.first_group = task.tile * args.tile_groups;
    task.first_row = task.first_group * kGroupRows;
    task.num_rows = min(args.rows - task.first_row, args.tile_groups * kGroupRows);
  } else {
    if (args.kind == GemmKind::kGateUp) {
      task.which = t & 1;
      t >>= 1;
    }
    task.entry = Divide(&t, args.by_blocks);
    task.unit = t;
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
  if (args.kind == GemmKind::kLinear) {
    return (args.num_units + args.task_units - 1) / args.task_units * args.num_tiles * per_unit;
  }
  return num_entries * args.num_blocks * (args.kind == GemmKind::kGateUp ? 2 : 1) * per_unit;
}

// Blocks of outputs of a task that exist: the last of an odd number has one.
template <int U>
__device__ __forceinline__ int UnitsOf(const GemmArgs& args, int unit) {
  return U == 1 ? 1 : min(U, args.num_units - unit);
}

// --- producer ---

// Streams the tasks of a block through the ring; one thread. It shares the issue slots with eight
// busy warps, so what it does per stage is kept to two dozen instructions.
// kAhead: the weights of the first args.ahead_stages stages have barriers of their own, `early`,
// if inputs are streamed: consumers decode them before the inputs are there.
template <int K, int kStagePairs, int U = 1, bool kAhead = false>
__device__ __forceinline__ void Produce(const GemmArgs& args,
                                        const MoeEntry* entries,
                                        int num_tasks,
                                        SharedHeader* header,
                                        char* ring,
                                        uint32_t early = 0) {
  constexpr uint32_t kPairWeights = 2 * 8 * kTileBytesPerBit * K;
  constexpr uint32_t kStageWeights = kStagePairs * kPairWeights;  // of a block of outputs
  const uint64_t policy = device::EvictFirstPolicy();
  const uint32_t ring_address = device::SharedAddress(ring);
  const uint32_t barriers = device::SharedAddress(header);
  const uint32_t stage_bytes = static_cast<uint32_t>(args.stage_bytes);
  const uint32_t num_stages = static_cast<uint32_t>(args.num_stages);
  const bool streamed = args.resident == 0;
  // The weights of the first ring do not depend on the previous kernel; its inputs follow the wait.
  bool waited = !streamed;
  uint32_t deferred = 0;
  auto issue_deferred = [&] {
    device::WaitForPrevious();
    for (uint32_t i = 0; i < deferred; ++i) {
      device::BulkCopy(ring_address + i * stage_bytes + U * kStageWeights,
                       reinterpret_cast<const void*>(header->deferred_from[i]),
                       header->deferred_bytes[i], barriers + 8 * i);
    }
    waited = true;
  };

  uint32_t stage = 0, parity = 1;  // the first round finds every stage empty
  uint32_t data = ring_address, full = barriers;
  int ahead = kAhead && streamed ? args.ahead_stages : 0;
  for (int t = static_cast<int>(blockIdx.x); t < num_tasks; t += static_cast<int>(gridDim.x)) {
    const Task task = MakeTask(args, entries, t);
    const uint8_t* trellis;
    int block = task.unit;
    int64_t group = task.first_group;
    if (args.kind == GemmKind::kLinear) {
      const GemmMatrix& m = args.matrices[task.matrix];
      trellis = m.trellis;
      block -= m.first_unit;
      group += static_cast<int64_t>(task.matrix) * args.num_groups;
    } else {
      const MoeExpert& e = args.experts[task.expert];
      trellis = args.kind == GemmKind::kDown ? e.down : (task.which == 0 ? e.gate : e.up);
      group += task.which * args.group_capacity;
    }
    const uint32_t pair_inputs = streamed ? static_cast<uint32_t>(task.num_groups) * kPairBytes : 0;
    const int first_pair = SegmentBegin(args, task.segment_begin);
    const bool both = U == 2 && UnitsOf<U>(args, task.unit) == 2;
    const uint8_t* weights =
        trellis + (static_cast<int64_t>(block) * args.pairs + first_pair) * kPairWeights;
    const char* inputs = static_cast<const char*>(args.xh) + group * args.pairs * kPairBytes +
                         static_cast<int64_t>(first_pair) * pair_inputs;
    for (int segment = task.segment_begin; segment < task.segment_end; ++segment) {
      int left = SegmentBegin(args, segment + 1) - SegmentBegin(args, segment);
#pragma unroll 1
      for (; left > 0; left -= kStagePairs) {
        const uint32_t pairs = static_cast<uint32_t>(min(left, kStagePairs));
        const uint32_t bytes = pairs * kPairWeights, input_bytes = pairs * pair_inputs;
        device::BarrierWait(full + 8 * kMaxStages, parity);
        uint32_t weights_here = full;
        if (kAhead && ahead > 0) {
          weights_here = early + 8 * stage;
          device::BarrierArriveExpect(weights_here, (both ? 2 : 1) * bytes);
          device::BarrierArriveExpect(full, input_bytes);
          --ahead;
        } else {
          device::BarrierArriveExpect(full, (both ? 2 : 1) * bytes + input_bytes);
        }
        device::BulkCopyEvictFirst(data, weights, bytes, weights_here, policy);
        if (both) {
          device::BulkCopyEvictFirst(data + kStageWeights,
                                     weights + static_cast<int64_t>(args.pairs) * kPairWeights,
                                     bytes, weights_here, policy);
        }
        weights += bytes;
        if (streamed) {
          if (waited) {
            device::BulkCopy(data + U * kStageWeights, inputs, input_bytes, full);
          } else {
            header->deferred_from[deferred] = reinterpret_cast<uint64_t>(inputs);
            header->deferred_bytes[deferred] = input_bytes;
            if (++deferred == num_stages) issue_deferred();
          }
          inputs += input_bytes;
        }
        data += stage_bytes;
        full += 8;
        if (++stage == num_stages) {
          stage = 0;
          parity ^= 1;
          data = ring_address;
          full = barriers;
        }
      }
    }
  }
  if (!waited) issue_deferred();
}

// --- consumers ---

struct Ring {
  uint32_t data;     // of the current stage
  uint32_t barrier;  // its full barrier
  uint32_t stages_left;
  uint32_t parity;
};

// Where a lane reads in the current stage; everything else is an immediate offset.
struct StageAddress {
  uint32_t word0, word1, word2;  // of the tile of this warp in the first tile row
  uint32_t b;                    // of the first pair of the first group
};

// Decodes a warp's tiles of a pair of tile rows of the stage.
template <int K, int kCodebook, int TC>
__device__ __forceinline__ void DecodePairOfTiles(const StageAddress& at,
                                                  int pair,
                                                  uint32_t shift,
                                                  uint32_t (&a)[TC][2][4]) {
#pragma unroll
  for (int c = 0; c < TC; ++c) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const uint32_t offset = (8 * (2 * pair + r) + c) * kTileBytesPerBit * K;
      TileWords<K> words;
      words.w[0] = device::LoadShared(at.word0 + offset);
      words.w[1] = device::LoadShared(at.word1 + offset);
      if constexpr (K > 4) words.w[2] = device::LoadShared(at.word2 + offset);
      DecodeTile<K, kCodebook>(words, shift, a[c][r]);
    }
  }
}

// A decoded pair of tile rows times the rows.
template <int TC, int NT, int kGroups>
__device__ __forceinline__ void MultiplyDecoded(const uint32_t (&a)[TC][2][4],
                                                uint32_t b,
                                                float (&acc)[TC][NT][4]) {
  // The two tile rows of an accumulator depend on each other: other accumulators go between them,
  // as far as registers allow.
  constexpr int kBatch = TC == 1 ? (kGroups % 2 == 0 ? 2 : 1) : kGroups % 3 == 0 ? 3 : 1;
#pragma unroll
  for (int g0 = 0; g0 < kGroups; g0 += kBatch) {
    uint4 x[kBatch];
#pragma unroll
    for (int g = 0; g < kBatch; ++g)
      x[g] = device::LoadShared128(b + (g0 + g) * kPairBytes);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int g = 0; g < kBatch; ++g) {
#pragma unroll
        for (int c = 0; c < TC; ++c) {
          device::MmaF16(acc[c][g0 + g], a[c][r], r == 0 ? x[g].x : x[g].z,
                         r == 0 ? x[g].y : x[g].w);
        }
      }
    }
  }
}

// `kPairs` pairs of tile rows for `kGroups` row groups; groups that the task has not are multiplied
// too, but never stored.
template <int K, int kCodebook, int TC, int NT, int kGroups, int kPairs>
__device__ __forceinline__ void MultiplyPairs(const StageAddress& at,
                                              uint32_t shift,
                                              uint32_t pair_inputs,
                                              float (&acc)[TC][NT][4]) {
#pragma unroll
  for (int i = 0; i < kPairs; ++i) {
    const uint32_t b = at.b + (NT == 1 ? i * kPairBytes : i * pair_inputs);
    uint32_t a[TC][2][4];
    DecodePairOfTiles<K, kCodebook, TC>(at, i, shift, a);
    MultiplyDecoded<TC, NT, kGroups>(a, b, acc);
  }
}

// As above; wide kernels skip quarters that the task does not have.
template <int K, int kCodebook, int TC, int NT, int kPairs>
__device__ __forceinline__ void MultiplyGroups(const StageAddress& at,
                                               uint32_t shift,
                                               int num_groups,
                                               uint32_t pair_inputs,
                                               float (&acc)[TC][NT][4]) {
  if constexpr (NT == 12) {
    if (num_groups <= 6) {
      MultiplyPairs<K, kCodebook, TC, NT, 6, kPairs>(at, shift, pair_inputs, acc);
    } else if (num_groups <= 9) {
      MultiplyPairs<K, kCodebook, TC, NT, 9, kPairs>(at, shift, pair_inputs, acc);
    } else {
      MultiplyPairs<K, kCodebook, TC, NT, 12, kPairs>(at, shift, pair_inputs, acc);
    }
  } else if constexpr (NT == 6 && TC > 1) {
    if (num_groups <= 3) {
      MultiplyPairs<K, kCodebook, TC, NT, 3, kPairs>(at, shift, pair_inputs, acc);
    } else {
      MultiplyPairs<K, kCodebook, TC, NT, 6, kPairs>(at, shift, pair_inputs, acc);
    }
  } else {
    MultiplyPairs<K, kCodebook, TC, NT, NT, kPairs>(at, shift, pair_inputs, acc);
  }
}

template <int kStagePairs, int K, int TC, int U>
__device__ __forceinline__ StageAddress
Address(const Ring& ring, const LaneWindow& window, bool resident, uint32_t resident_b) {
  constexpr uint32_t kStageWeights = 2 * kStagePairs * (8 * kTileBytesPerBit * K);
  const uint32_t warp = threadIdx.x / 32;
  const uint32_t tile = ring.data + warp / kWarps<TC> * kStageWeights +
                        warp % kWarps<TC> * (TC * kTileBytesPerBit * K);
  return {tile + window.word0, tile + window.word1, tile + window.word2,
          resident ? resident_b : ring.data + U * kStageWeights + (threadIdx.x & 31) * 16};
}

// Gives the current stage back to the producer and goes on to the next.
__device__ __forceinline__ void Release(const GemmArgs& args,
                                        Ring& ring,
                                        uint32_t ring_base,
                                        uint32_t barriers) {
  device::WarpArrive(ring.barrier + 8 * kMaxStages);
  ring.barrier += 8;
  ring.data += static_cast<uint32_t>(args.stage_bytes);
  if (--ring.stages_left == 0) {
    ring = {ring_base, barriers, static_cast<uint32_t>(args.num_stages), ring.parity ^ 1};
  }
}

// Multiplies the next `left` pairs of the ring.
template <int K, int kCodebook, int TC, int NT, int kStagePairs, int U>
__device__ __forceinline__ void MultiplyRun(const GemmArgs& args,
                                            int left,
                                            int num_groups,
                                            uint32_t pair_inputs,
                                            uint32_t barriers,
                                            uint32_t ring_base,
                                            const LaneWindow& window,
                                            uint32_t& next_resident,
                                            Ring& ring,
                                            float (&acc)[TC][NT][4]) {
  constexpr int kRowBytes = 8 * kTileBytesPerBit * K;
  const bool resident = args.resident != 0;
#pragma unroll 1
  for (; left >= kStagePairs; left -= kStagePairs) {
    device::BarrierWait(ring.barrier, ring.parity);
    const StageAddress at = Address<kStagePairs, K, TC, U>(ring, window, resident, next_resident);
    MultiplyGroups<K, kCodebook, TC, NT, kStagePairs>(at, window.shift, num_groups, pair_inputs,
                                                      acc);
    next_resident += kStagePairs * pair_inputs;
    Release(args, ring, ring_base, barriers);
  }
  if (left > 0) {
    device::BarrierWait(ring.barrier, ring.parity);
    StageAddress at = Address<kStagePairs, K, TC, U>(ring, window, resident, next_resident);
#pragma unroll 1
    for (int i = 0; i < left; ++i) {
      MultiplyPairs<K, kCodebook, TC, NT, NT, 1>(at, window.shift, pair_inputs, acc);
      at.word0 += 2 * kRowBytes;
      at.word1 += 2 * kRowBytes;
      at.word2 += 2 * kRowBytes;
      at.b += pair_inputs;
    }
    next_resident += static_cast<uint32_t>(left) * pair_inputs;
    Release(args, ring, ring_base, barriers);
  }
}

// Multiplies one task. Leaves the sums in acc: of the only segment, or of all of them.
template <int K, int kCodebook, int TC, int NT, int kStagePairs, int U = 1>
__device__ __forceinline__ void MultiplyTask(const GemmArgs& args,
                                             const Task& task,
                                             uint32_t barriers,
                                             uint32_t ring_base,
                                             uint32_t resident_b,
                                             float4* totals,
                                             const LaneWindow& window,
                                             Ring& ring,
                                             float (&acc)[TC][NT][4]) {
  const uint32_t lane = threadIdx.x & 31;
  const uint32_t pair_inputs =
      NT == 1 ? kPairBytes : static_cast<uint32_t>(task.num_groups) * kPairBytes;
  uint32_t next_resident = resident_b + lane * 16;
  for (int segment = task.segment_begin; segment < task.segment_end; ++segment) {
    int left = SegmentBegin(args, segment + 1) - SegmentBegin(args, segment);
#pragma unroll
    for (int c = 0; c < TC; ++c) {
#pragma unroll
      for (int g = 0; g < NT; ++g) {
#pragma unroll
        for (int i = 0; i < 4; ++i)
          acc[c][g][i] = 0.0f;
      }
    }
    MultiplyRun<K, kCodebook, TC, NT, kStagePairs, U>(args, left, task.num_groups, pair_inputs,
                                                      barriers, ring_base, window, next_resident,
                                                      ring, acc);
    if (task.segment_end - task.segment_begin == 1) return;
    float4* mine = totals + threadIdx.x;
    const bool is_first = segment == task.segment_begin;
    const bool is_last = segment + 1 == task.segment_end;
#pragma unroll
    for (int c = 0; c < TC; ++c) {
#pragma unroll
      for (int g = 0; g < NT; ++g) {
        float4& total = mine[(c * NT + g) * kConsumers<TC, U>];
        float(&v)[4] = acc[c][g];
        if (!is_first) {
          const float4 t = total;
          v[0] = t.x + v[0];
          v[1] = t.y + v[1];
          v[2] = t.z + v[2];
          v[3] = t.w + v[3];
        }
        if (!is_last) total = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
  }
}

// Where the segment sums of gate (`which` 0) or up of a sorted position begin.
__device__ __forceinline__ float* GateUpPartial(
    const GemmArgs& args, int64_t position, int unit, int which, int num_partials) {
  return args.partial + ((position * args.num_blocks + unit) * 2 + which) * num_partials * kBlockN;
}

// Puts fragments into rows of 128 outputs: row r of the task's block of outputs u < units goes to
// row_address(r, u).
template <int TC, int NT, class RowAddress>
__device__ __forceinline__ void StoreFragments(const float (&acc)[TC][NT][4],
                                               int num_rows,
                                               int units,
                                               RowAddress row_address) {
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int unit = warp / kWarps<TC>;
  const int col = warp % kWarps<TC> * TC * 16 + lane / 4;
  if (unit >= units) return;
#pragma unroll
  for (int g = 0; g < NT; ++g) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = g * kGroupRows + 2 * (lane & 3) + i;
      if (row < num_rows) {
        float* out = row_address(row, unit) + col;
#pragma unroll
        for (int c = 0; c < TC; ++c) {
          out[c * 16] = acc[c][g][i];
          out[c * 16 + 8] = acc[c][g][2 + i];
        }
      }
    }
  }
}

// True in every consumer thread of the block that arrives last of `expected` at the counter; then
// everything the others wrote before arriving is visible.
template <int kThreads>
__device__ __forceinline__ bool ArriveLast(uint32_t* counter,
                                           uint32_t expected,
                                           SharedHeader* header) {
  device::NamedBarrier(kConsumerBarrier, kThreads);
  if (threadIdx.x == 0) {
    // Release and acquire; cumulative, so it covers what the barrier made visible to this thread.
    const bool last = device::AtomicAddAcquireRelease(counter, 1u) == expected - 1;
    if (last) *counter = 0;
    header->last_arrival = last;
  }
  device::NamedBarrier(kConsumerBarrier, kThreads);
  return header->last_arrival != 0;
}

template <int TC, int NT, int U>
__device__ __forceinline__ void FinishTask(const GemmArgs& args,
                                           const Task& task,
                                           SharedHeader* header,
                                           const int32_t* order,
                                           float* z,
                                           const float (&acc)[TC][NT][4]) {
  constexpr int kThreads = kConsumers<TC, U>, kRowStep = kWarps<TC, U> / U;
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int num_partials = args.whole ? 1 : args.num_segments;
  const int segment = args.whole ? 0 : task.segment_begin;

  if (U == 1 && args.kind == GemmKind::kGateUp) {
    StoreFragments<TC, NT>(acc, task.num_rows, 1, [&](int row, int) {
      return GateUpPartial(args, task.first_row + row, task.unit, task.which, num_partials) +
             segment * kBlockN;
    });
    return;
  }
  if (U == 1 && args.kind == GemmKind::kDown) {
    StoreFragments<TC, NT>(acc, task.num_rows, 1, [&](int row, int) {
      return args.slot_out +
             (static_cast<int64_t>(order[task.first_row + row]) * args.num_blocks + task.unit) *
                 kBlockN;
    });
    return;
  }

  const GemmMatrix& m = args.matrices[task.matrix];
  const int units = UnitsOf<U>(args, task.unit);
  // A warp finishes every kRowStep-th row of one block of outputs.
  const int unit = warp % U, block = task.unit - m.first_unit + (unit < units ? unit : 0);
  const int end = unit < units ? task.num_rows : 0;
  if (args.whole) {
    const float4 svh = LoadHalf4(m.svh, block * kBlockN + 4 * lane);
    device::NamedBarrier(kConsumerBarrier, kThreads);  // z is free (it overlaps totals)
    StoreFragments<TC, NT>(acc, task.num_rows, units, [&](int row, int u) {
      return z + (u * NT * kGroupRows + row) * kZStride;
    });
    device::NamedBarrier(kConsumerBarrier, kThreads);
    for (int row = warp / U; row < end; row += kRowStep) {
      const float4 v = *reinterpret_cast<const float4*>(
          z + (unit * NT * kGroupRows + row) * kZStride + 4 * lane);
      FinishLinearRow(args, m, block, task.first_row + row, v, svh, lane);
    }
    // The next task's segment sums overlap z.
    if (args.num_segments > 1) device::NamedBarrier(kConsumerBarrier, kThreads);
    return;
  }

  auto partial = [&](int row, int u) {
    const int64_t at = static_cast<int64_t>(task.unit + u) * args.rows + task.first_row + row;
    return args.partial + at * num_partials * kBlockN;
  };
  StoreFragments<TC, NT>(acc, task.num_rows, units,
                         [&](int row, int u) { return partial(row, u) + segment * kBlockN; });
  if (args.external_finish) return;
  const float4 svh = LoadHalf4(m.svh, block * kBlockN + 4 * lane);
  uint32_t* counter = args.counters + task.unit * args.num_tiles + task.tile;
  if (!ArriveLast<kThreads>(counter, static_cast<uint32_t>(args.num_segments), header)) return;
  for (int row = warp / U; row < end; row += kRowStep) {
    const float4 v = SumSegments(partial(row, unit), num_partials, lane);
    FinishLinearRow(args, m, block, task.first_row + row, v, svh, lane);
  }
}

// Whether the block's previous task had the same inputs (one tile of rows, as resident inputs
// have).
__device__ __forceinline__ bool SameInputs(const GemmArgs& args, const Task& task, int task_index) {
  const int before = task_index - static_cast<int>(gridDim.x);
  if (before < 0) return false;
  const Task previous = MakeTask(args, nullptr, before);
  return previous.matrix == task.matrix && previous.segment_begin == task.segment_begin;
}

// Rotates the inputs of a task if the block does that and does not have them.
template <int TC, int U>
__device__ __forceinline__ void RotateResident(const GemmArgs& args,
                                               const Task& task,
                                               int task_index,
                                               uint32_t shared) {
  if (!args.resident || SameInputs(args, task, task_index)) return;
  device::NamedBarrier(kConsumerBarrier, kConsumers<TC, U>);
  RotateInputs(
      args, args.matrices[task.matrix], SegmentBegin(args, task.segment_begin),
      SegmentBegin(args, task.segment_end), shared + static_cast<uint32_t>(args.resident_offset),
      static_cast<int>(threadIdx.x / 32), kWarps<TC, U>,
      [](uint32_t at, auto v) { device::StoreShared(at, v); }, [] {});
  device::NamedBarrier(kConsumerBarrier, kConsumers<TC, U>);
}

template <int K, int kCodebook, int TC, int NT, int kStagePairs, int U = 1>
__device__ __forceinline__ void RunTask(const GemmArgs& args,
                                        const MoeEntry* entries,
                                        int task_index,
                                        SharedHeader* header,
                                        char* shared,
                                        const int32_t* order,
                                        const LaneWindow& window,
                                        Ring& ring) {
  float acc[TC][NT][4];
  float* z = reinterpret_cast<float*>(shared + args.z_offset);
  {
    const Task task = MakeTask(args, entries, task_index);
    RotateResident<TC, U>(args, task, task_index, device::SharedAddress(shared));
    const uint32_t shared_address = device::SharedAddress(shared);
    MultiplyTask<K, kCodebook, TC, NT, kStagePairs, U>(
        args, task, shared_address, shared_address + kSharedHeaderBytes,
        shared_address + args.resident_offset, reinterpret_cast<float4*>(z), window, ring, acc);
  }
  // Made again rather than kept: the product needs every register.
  asm volatile("" : "+r"(task_index));
  FinishTask<TC, NT, U>(args, MakeTask(args, entries, task_index), header, order, z, acc);
}

template <int K, int kCodebook, int TC, int NT>
__device__ __forceinline__ void Consume(const GemmArgs& args,
                                        const MoeEntry* entries,
                                        const int32_t* order,
                                        int num_tasks,
                                        SharedHeader* header,
                                        char* shared) {
  constexpr int kStagePairs = kStagePairsOf<NT>;
  const LaneWindow window = MakeLaneWindow<K>(static_cast<int>(threadIdx.x & 31));
  const uint32_t shared_address = device::SharedAddress(shared);
  Ring ring = {shared_address + kSharedHeaderBytes, shared_address,
               static_cast<uint32_t>(args.num_stages), 0};
  for (int t = static_cast<int>(blockIdx.x); t < num_tasks; t += static_cast<int>(gridDim.x)) {
    const int groups = NT == 1 ? 1 : MakeTask(args, entries, t).num_groups;
    // Most experts have a row or two, whatever the launch allows for.
    if (NT == 1 || groups == 1) {
      RunTask<K, kCodebook, TC, 1, kStagePairs>(args, entries, t, header, shared, order, window,
                                                ring);
    } else {
      RunTask<K, kCodebook, TC, NT, kStagePairs>(args, entries, t, header, shared, order, window,
                                                 ring);
    }
  }
}

// Brings what the block needs after the wait near while the previous kernel finishes: its
// parameters (every launch has its own, so their cache lines are cold) and the vectors of its first
// task.
__device__ __forceinline__ void Prefetch(const GemmArgs& args,
                                         const MoeEntry* entries,
                                         int num_tasks) {
  uint32_t touched = 0;
#pragma unroll 1
  for (uint32_t i = 0; i < sizeof(GemmArgs); i += 64) {
    touched += *reinterpret_cast<const uint32_t*>(reinterpret_cast<const char*>(&args) + i);
  }
  asm volatile("" ::"r"(touched));
  const int t = static_cast<int>(blockIdx.x);
  if (args.kind != GemmKind::kLinear || t >= num_tasks) return;
  const Task task = MakeTask(args, entries, t);
  const GemmMatrix& m = args.matrices[task.matrix];
  const int line = static_cast<int>(threadIdx.x) * 64;  // f16 numbers in a line of 128 bytes
  if (args.resident) {
    const int begin = SegmentBegin(args, task.segment_begin) * kPairK / kBlockN * kBlockN;
    if (begin + line < SegmentBegin(args, task.segment_end) * kPairK) {
      device::PrefetchL2(static_cast<const __half*>(m.suh) + begin + line);
    }
  }
  if (line < kBlockN) {
    device::PrefetchL2(static_cast<const __half*>(m.svh) + (task.unit - m.first_unit) * kBlockN +
                       line);
    device::PrefetchL2(args.counters + task.unit * args.num_tiles + task.tile);
  }
}

template <int K, int kCodebook, int TC, int NT>
__global__ void __launch_bounds__(kConsumers<TC> + 32, kBlocksByRegisters<NT>)
    Exl3GemmKernel(const __grid_constant__ GemmArgs args) {
  extern __shared__ __align__(128) char shared[];
  SharedHeader* header = reinterpret_cast<SharedHeader*>(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.num_stages; ++i) {
      device::BarrierInit(device::SharedAddress(&header->full[i]), 1);
      device::BarrierInit(device::SharedAddress(&header->empty[i]),
                          device::kWarpArrivals * kWarps<TC>);
    }
    device::FenceBarrierInit();
  }
  // Routing is older than the previous kernel, which rotated or activated the inputs.
  const MoeEntry* entries = args.entries;
  const int32_t* order = args.order;
  const int num_entries = args.kind == GemmKind::kLinear ? 0 : *args.num_entries;
  __syncthreads();
  const int num_tasks = NumTasks(args, num_entries);
  if (threadIdx.x >= kConsumers<TC>) {
    if (threadIdx.x % 32 != 0) return;
    Produce<K, kStagePairsOf<NT>>(args, entries, num_tasks, header, shared + kSharedHeaderBytes);
  } else {
    Prefetch(args, entries, num_tasks);
    device::WaitForPrevious();
    device::LaunchNext();
    Consume<K, kCodebook, TC, NT>(args, entries, order, num_tasks, header, shared);
  }
}

inline int LaunchProduct(void (*kernel)(GemmArgs),
                         int threads,
                         const GemmArgs& args,
                         int grid,
                         size_t shared_bytes,
                         void* stream) {
  // Cheap, idempotent and per device, so it is simply repeated.
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return static_cast<int>(error);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = 1;
  return static_cast<int>(cudaLaunchKernelEx(&config, kernel, args));
}

template <int K, int kCodebook, int TC, int NT>
int LaunchGemm(const GemmArgs& args, int grid, size_t shared_bytes, void* stream) {
  return LaunchProduct(&Exl3GemmKernel<K, kCodebook, TC, NT>, kConsumers<TC> + 32, args, grid,
                       shared_bytes, stream);
}

template <int K>
GemmLauncher PickGemm(int codebook, int groups, bool wide) {
  if (codebook == kCodebookMul1) {
    switch (groups) {
      case 1:
        return &LaunchGemm<K, kCodebookMul1, 1, 1>;
      case 2:
        return &LaunchGemm<K, kCodebookMul1, 1, 2>;
      case 3:
        return &LaunchGemm<K, kCodebookMul1, 1, 3>;
      case 4:
        return &LaunchGemm<K, kCodebookMul1, 1, 4>;
      case 6:
        return wide ? &LaunchGemm<K, kCodebookMul1, 2, 6> : &LaunchGemm<K, kCodebookMul1, 1, 6>;
      default:
        return &LaunchGemm<K, kCodebookMul1, 2, 12>;
    }
  }
  // The rarer codebooks are compiled for one size only, which serves all.
  if (codebook == kCodebookMcg) return &LaunchGemm<K, kCodebookMcg, 2, kMaxTileGroups>;
  if (codebook == kCodebook3Inst) return &LaunchGemm<K, kCodebook3Inst, 2, kMaxTileGroups>;
  return nullptr;
}

}  // namespace twinspark::exl3
