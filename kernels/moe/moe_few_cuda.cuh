// The product of a few rows with their experts: the kernel of exl3_gemm_cuda.cuh (a producer
// that streams weights and rotated inputs through a ring, eight warps that decode and multiply) for
// tasks of 128 outputs of one expert x one segment x up to 24 rows.
//
// What it adds is what few rows need, whose time goes to starts and ends as much as to products:
//  - Only the producer warp knows what a task is. It writes a note of 16 bytes for the consumers
//    into the stage where the task begins; they do no arithmetic about tasks.
//  - Whole rounds of tasks are taken by whoever comes: SMs are not equally fast, and of two blocks
//    on an SM one runs at twice the speed of the other. The rest, or all of very few tasks, is
//    dealt to the SMs, so that none gets two of the last tasks while another gets none.
//  - Only the producer waits for the previous kernel, and only before inputs that it may still be
//    writing. Gate/up lets the next kernel start when its early experts are done (moe_few_cuda.h),
//    and down begins with those while the activation of the others runs.
// No block waits for another one.
#pragma once

#include <cstdint>

#include <cuda_runtime.h>

#include "kernels/cuda/launch_cuda.cuh"
#include "kernels/device/ptx.cuh"
#include "kernels/exl3/exl3_gemm_cuda.cuh"
#include "kernels/moe/moe_few_cuda.h"

namespace twinspark::exl3 {

inline constexpr int kFewMaxStages = 8;
inline constexpr uint32_t kFewAhead = 3;  // stages of weights before inputs are waited for
inline constexpr int kFewStagePairs = 4;
inline constexpr int kFewThreads = kConsumers<1> + 32;

// Start of shared memory. `full` and `empty` as in SharedHeader, at distances the consumers know.
struct FewHeader {
  uint64_t full[kFewMaxStages];
  uint64_t empty[kFewMaxStages];
  uint4 note[kFewMaxStages];  // of the task that begins in a stage
  uint32_t warps_done;        // with the early experts
};
inline constexpr uint32_t kFewEmpty = 8 * kFewMaxStages;   // from a full barrier to its empty one
inline constexpr uint32_t kFewNotes = 16 * kFewMaxStages;  // from the header to the notes
inline constexpr int kFewHeaderBytes = 512;
static_assert(sizeof(FewHeader) <= kFewHeaderBytes);

struct FewEntry {
  const uint8_t* weights[2];  // gate and up, or down
  int32_t first, count;       // positions; a count of 0: no expert begins here
};

// Behind the ring, `slots` of each (padded).
struct FewRoute {
  FewEntry* at;     // by position
  int32_t* id;      // by slot
  int32_t* listed;  // positions where experts begin, ascending
};
inline __host__ __device__ int FewPaddedSlots(int slots) {
  return (slots + 3) / 4 * 4;
}
inline __host__ __device__ size_t FewRouteBytes(int slots) {
  return static_cast<size_t>(FewPaddedSlots(slots)) * (sizeof(FewEntry) + 2 * sizeof(int32_t));
}
__device__ __forceinline__ FewRoute FewRouteAt(char* at, int slots) {
  const int n = FewPaddedSlots(slots);
  FewRoute route;
  route.at = reinterpret_cast<FewEntry*>(at);
  route.id = reinterpret_cast<int32_t*>(route.at + n);
  route.listed = route.id + n;
  return route;
}

// Finds where experts begin among the sorted slots; all threads.
__device__ __forceinline__ void SortFew(const MoeFewArgs& args, const FewRoute& route) {
  const int n = args.num_slots, padded = FewPaddedSlots(n), tid = static_cast<int>(threadIdx.x);
  for (int i = tid; i < padded; i += kFewThreads) {
    route.id[i] = i < n ? args.ids[i] : 0x7fffffff;
    route.at[i].count = 0;
  }
  __syncthreads();
  for (int i = tid; i < n; i += kFewThreads) {
    const int id = route.id[i];
    const MoeExpert& e = args.experts[id];
    const uint8_t* first = args.down ? e.down : e.gate;  // in flight while slots are counted
    const uint8_t* second = e.up;
    int less = 0, before = 0, equal = 0;
#pragma unroll 2
    for (int j = 0; j < padded; j += 4) {
      const int4 others = *reinterpret_cast<const int4*>(route.id + j);
      const int other[4] = {others.x, others.y, others.z, others.w};
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        less += other[k] < id;
        equal += other[k] == id;
        before += other[k] == id && j + k < i;
      }
    }
    if (before == 0) route.at[less] = FewEntry{{first, second}, less, equal};
  }
  __syncthreads();
}

// Lists the experts in ascending order; one warp. Returns how many there are, and how many are
// early.
__device__ __forceinline__ int2 ListFew(const MoeFewArgs& args, const FewRoute& route, int lane) {
  int entries = 0, early = 0;
  for (int begin = 0; begin < args.num_slots; begin += 32) {
    const int position = begin + lane;
    const bool head = position < args.num_slots && route.at[position].count != 0;
    const uint32_t heads = __ballot_sync(0xffffffffu, head);
    if (head) route.listed[entries + __popc(heads & ((1u << lane) - 1))] = position;
    early += __popc(__ballot_sync(0xffffffffu, head && position < args.early_slots));
    entries += __popc(heads);
  }
  __syncwarp();
  return make_int2(entries, early);
}

__device__ __forceinline__ uint32_t DivideFew(uint32_t* n, const FastDivisor& by) {
  const uint32_t quotient = by.magic == 0 ? *n : __umulhi(*n, by.magic);
  *n -= quotient * by.divisor;
  return quotient;
}

__device__ __forceinline__ uint32_t ThisSm() {
  uint32_t sm;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
  return sm;
}

// Takes a block's tasks; one thread.
class FewTasks {
 public:
  // Asks for the first one, so that the answer is there when the tasks have been counted.
  // `takes`: this is the thread.
  __device__ __forceinline__ FewTasks(const MoeFewArgs& args, bool takes)
      : counters_(args.counters),
        num_sms_(static_cast<uint32_t>(args.num_sms)),
        sm_(min(ThisSm(), num_sms_ - 1)),
        dealt_(args.dealt != 0) {
    if (takes) number_ = Ask();
  }
  __device__ __forceinline__ void SetCount(uint32_t num_tasks) {
    num_tasks_ = num_tasks;
    num_shared_ = dealt_ ? 0 : num_tasks / gridDim.x * gridDim.x;
  }
  // The count when there are no more for this block.
  __device__ __forceinline__ uint32_t Next() {
    while (true) {
      if (!asked_) number_ = Ask();
      asked_ = false;
      if (dealt_) return min(num_tasks_, Dealt(number_, sm_));
      if (number_ < num_shared_) return number_;
      dealt_ = true;
    }
  }
  __device__ __forceinline__ uint32_t num_shared() const { return num_shared_; }
  // How many tasks of an SM's share have been taken; for the last block.
  __device__ __forceinline__ uint32_t Taken(uint32_t sm) const {
    return __ldcg(counters_ + kFewOwn + sm);
  }

  // A share's tasks, ascending. They are not all of the same segment, whose lengths differ.
  __device__ __forceinline__ uint32_t Dealt(uint32_t number, uint32_t sm) const {
    return num_shared_ + number * num_sms_ + (sm + number) % num_sms_;
  }

 private:
  __device__ __forceinline__ uint32_t Ask() const {
    return atomicAdd(counters_ + (dealt_ ? kFewOwn + sm_ : 0), 1u);
  }

  uint32_t* counters_;
  uint32_t num_sms_, sm_;
  uint32_t number_ = 0, num_tasks_ = 0, num_shared_ = 0;
  bool dealt_;
  bool asked_ = true;
};

// Streams tasks through the ring; a whole warp, one lane of which copies. Two of the consumer warps
// share its scheduler, so what it does for a stage is kept short.
template <int K>
class FewProducer {
 public:
  // `num_early`: tasks of early experts. `say_from`: from this task on a block says that it has no
  // early one left.
  __device__ __forceinline__ FewProducer(const MoeFewArgs& args,
                                         const FewRoute& route,
                                         uint32_t num_early,
                                         uint32_t say_from,
                                         uint32_t shared)
      : args_(args),
        route_(route),
        shared_(shared),
        num_early_(num_early),
        say_from_(say_from),
        stage_bytes_(static_cast<uint32_t>(args.stage_bytes)),
        end_full_(shared + 8 * static_cast<uint32_t>(args.num_stages)),
        at_{shared, shared + kFewHeaderBytes, 1} {}

  // What the previous kernel wrote is there. Every block waits, so that the end of this kernel is
  // the end of those before it.
  __device__ __forceinline__ void Wait() {
    if (!waited_) device::WaitForPrevious();
    waited_ = true;
  }

  __device__ __forceinline__ void Issue(uint32_t t) {
    const uint32_t whiches = args_.down ? 1 : 2;
    uint32_t rest = t;
    uint32_t unit = DivideFew(&rest, args_.by_segments);
    const uint32_t segment = rest;
    uint32_t which = 0;
    if (whiches == 2) {
      which = unit & 1;
      unit >>= 1;
    }
    const FewEntry& entry = route_.at[route_.listed[DivideFew(&unit, args_.by_blocks)]];
    const uint32_t groups = (static_cast<uint32_t>(entry.count) + kGroupRows - 1) / kGroupRows;
    const uint32_t first_pair = args_.segment_begin[segment];
    const uint32_t pairs = args_.segment_begin[segment + 1] - first_pair;
    const uint32_t pair_inputs = groups * kPairBytes;
    const uint64_t out = reinterpret_cast<uint64_t>(
        args_.sums + static_cast<int64_t>(entry.first) * args_.row_stride +
        ((unit * whiches + which) * args_.by_segments.divisor + segment) * kBlockN);
    const uint8_t* weights = entry.weights[which] +
                             (static_cast<int64_t>(unit) * args_.pairs + first_pair) * kPairWeights;
    const char* inputs = static_cast<const char*>(args_.xh) +
                         (static_cast<int64_t>(which) * args_.which_groups + entry.first) *
                             args_.pairs * kPairBytes +
                         static_cast<int64_t>(first_pair) * pair_inputs;
    Task task = {device::Uniform(weights), device::Uniform(inputs), device::Uniform(pairs),
                 device::Uniform(pair_inputs)};
    at_.full = device::Uniform(at_.full);
    at_.data = device::Uniform(at_.data);
    WriteNote(make_uint4(static_cast<uint32_t>(out), static_cast<uint32_t>(out >> 32),
                         pairs | groups << 16,
                         static_cast<uint32_t>(entry.count) | (t >= say_from_ ? 1u << 31 : 0)));
    // The inputs of gate/up, and of down for late experts, may still be written.
    if (!waited_ && !(args_.down && t < num_early_)) IssueAhead(&task);
#pragma unroll 1
    while (task.pairs > 0) {
      const uint32_t pairs_now = StagePairsOf(task.pairs);
      WaitEmpty();
      if (device::ElectOne()) {
        CopyWeights(task, pairs_now);
        CopyInputs(task, at_, pairs_now);
      }
      task.weights += pairs_now * kPairWeights;
      task.inputs += pairs_now * pair_inputs;
      task.pairs -= pairs_now;
      Next(&at_);
    }
  }

  // Tells the consumers that there is nothing more.
  __device__ __forceinline__ void End() {
    WriteNote(make_uint4(0, 0, 0, 0));
    if ((threadIdx.x & 31) == 0) device::BarrierArrive(at_.full);
  }

 private:
  static constexpr uint32_t kPairWeights = 2 * 8 * kTileBytesPerBit * K;

  // What is left of a task.
  struct Task {
    const uint8_t* weights;
    const char* inputs;
    uint32_t pairs, pair_inputs;
  };
  struct Place {
    uint32_t full, data, parity;
  };

  __device__ __forceinline__ static uint32_t StagePairsOf(uint32_t left) {
    return min(left, static_cast<uint32_t>(kFewStagePairs));
  }
  __device__ __forceinline__ void WaitEmpty() const {
    device::BarrierWait(at_.full + kFewEmpty, at_.parity);
  }
  __device__ __forceinline__ void Next(Place* at) const {
    at->full += 8;
    at->data += stage_bytes_;
    if (at->full == end_full_) *at = {shared_, shared_ + kFewHeaderBytes, at->parity ^ 1};
  }
  __device__ __forceinline__ void WriteNote(uint4 note) const {
    WaitEmpty();
    if ((threadIdx.x & 31) == 0)
      device::StoreShared(shared_ + kFewNotes + 2 * (at_.full - shared_), note);
    __syncwarp();
  }
  // One lane: the stage's bytes are expected from here on.
  __device__ __forceinline__ void CopyWeights(const Task& task, uint32_t pairs) const {
    const uint32_t bytes = pairs * kPairWeights;
    device::BarrierArriveExpect(at_.full, bytes + pairs * task.pair_inputs);
    device::BulkCopyEvictFirst(at_.data, task.weights, bytes, at_.full, policy_);
  }
  __device__ __forceinline__ void CopyInputs(const Task& task,
                                             const Place& at,
                                             uint32_t pairs) const {
    device::BulkCopy(at.data + kFewStagePairs * kPairWeights, task.inputs, pairs * task.pair_inputs,
                     at.full);
  }
  // The weights of a task's first stages go ahead of the wait, their inputs follow it.
  __device__ __forceinline__ void IssueAhead(Task* task) {
    const bool lane0 = (threadIdx.x & 31) == 0;
    Place inputs_at = at_;
    uint32_t left = task->pairs;
    const uint32_t ahead = min(static_cast<uint32_t>(args_.num_stages), kFewAhead);
#pragma unroll 1
    for (uint32_t i = 0; i < ahead && task->pairs > 0; ++i) {
      const uint32_t pairs = StagePairsOf(task->pairs);
      WaitEmpty();
      if (lane0) CopyWeights(*task, pairs);
      __syncwarp();
      task->weights += pairs * kPairWeights;
      task->pairs -= pairs;
      Next(&at_);
    }
    Wait();
#pragma unroll 1
    while (left > task->pairs) {
      const uint32_t pairs = StagePairsOf(left);
      if (lane0) CopyInputs(*task, inputs_at, pairs);
      __syncwarp();
      task->inputs += pairs * task->pair_inputs;
      left -= pairs;
      Next(&inputs_at);
    }
  }

  const MoeFewArgs& args_;
  FewRoute route_;
  uint32_t shared_, num_early_, say_from_, stage_bytes_, end_full_;
  uint64_t policy_ = device::EvictFirstPolicy();
  bool waited_ = false;
  Place at_;  // the first round finds every stage empty
};

// The producer warp. `tasks`: of its first lane.
template <int K>
__device__ __forceinline__ void ProduceFew(const MoeFewArgs& args,
                                           const FewRoute& route,
                                           FewTasks& tasks,
                                           uint32_t shared) {
  const uint32_t lane = threadIdx.x & 31, num_sms = static_cast<uint32_t>(args.num_sms);
  const int2 counts = ListFew(args, route, static_cast<int>(lane));
  const uint32_t per_expert =
      args.by_blocks.divisor * args.by_segments.divisor * (args.down ? 1 : 2);
  const uint32_t num_tasks = device::Uniform(static_cast<uint32_t>(counts.x) * per_expert);
  const uint32_t num_early = device::Uniform(static_cast<uint32_t>(counts.y) * per_expert);
  tasks.SetCount(num_tasks);
  // A dealt task may be left to the last block: it is the end that says that there is none.
  const uint32_t say_from = num_early <= tasks.num_shared() ? num_early : ~0u;
  FewProducer<K> producer(args, route, num_early, say_from, shared);
  device::FenceCopies();
#pragma unroll 1
  while (true) {
    uint32_t t = 0;
    if (lane == 0) t = tasks.Next();
    t = device::Uniform(t);
    if (t >= num_tasks) break;
    producer.Issue(t);
  }
  producer.Wait();
  bool last = false;
  if (lane == 0) last = atomicAdd(args.counters + kFewDone, 1u) == gridDim.x - 1;
  if (device::Uniform(static_cast<int>(last)) != 0) {
    // Nobody takes any more. An SM that was given no block has left its share.
    bool left = false;
    for (uint32_t sm = lane; sm < num_sms; sm += 32)
      left |= tasks.Dealt(tasks.Taken(sm), sm) < num_tasks;
    if (__any_sync(0xffffffffu, left)) {
      for (uint32_t sm = 0; sm < num_sms; ++sm) {
        uint32_t number = device::Uniform(tasks.Taken(sm));
        for (uint32_t t = tasks.Dealt(number, sm); t < num_tasks; t = tasks.Dealt(++number, sm))
          producer.Issue(t);
      }
    }
    __syncwarp();
    for (uint32_t sm = lane; sm < num_sms; sm += 32)
      args.counters[kFewOwn + sm] = 0;
    if (lane == 0) args.counters[0] = args.counters[kFewDone] = 0;
  }
  producer.End();
}

// Where a warp is in the ring.
struct FewRing {
  uint32_t full;  // barrier of the current stage
  uint32_t data;  // its weights of this warp's column
  uint32_t parity;
};

// What a lane needs in every stage.
struct FewConsumer {
  uint32_t first_full, end_full, first_data, stage_bytes;
  uint32_t word0, word1, word2, shift;  // LaneWindow
  uint32_t inputs;                      // from FewRing::data to what the lane reads of the inputs
};

// Kept in a register: the compiler would rather compute it again in every stage.
__device__ __forceinline__ void Keep(uint32_t& v) {
  asm volatile("" : "+r"(v));
}

__device__ __forceinline__ void ReleaseFew(const FewConsumer& c, FewRing& ring) {
  device::WarpArrive(ring.full + kFewEmpty);
  ring.full += 8;
  ring.data += c.stage_bytes;
  if (ring.full == c.end_full) ring = {c.first_full, c.first_data, ring.parity ^ 1};
}

// One task, whose first stage is there; note: FewHeader.
template <int K, int kCodebook, int NT>
__device__ __forceinline__ void RunFewTask(const FewConsumer& c,
                                           const uint4& note,
                                           int row_stride,
                                           FewRing& ring) {
  constexpr int kRowBytes = 8 * kTileBytesPerBit * K;
  const int warp = static_cast<int>(threadIdx.x / 32), lane = static_cast<int>(threadIdx.x & 31);
  const int groups = static_cast<int>(note.z >> 16);
  const uint32_t pair_inputs = NT == 1 ? kPairBytes : static_cast<uint32_t>(groups) * kPairBytes;
  float acc[1][NT][4] = {};
  int left = static_cast<int>(note.z & 0xffff);
  auto at = [&] {
    return StageAddress{ring.data + c.word0, ring.data + c.word1, ring.data + c.word2,
                        ring.data + c.inputs};
  };
#pragma unroll 1
  for (; left >= kFewStagePairs;) {
    MultiplyGroups<K, kCodebook, 1, NT, kFewStagePairs>(at(), c.shift, groups, pair_inputs, acc);
    ReleaseFew(c, ring);
    left -= kFewStagePairs;
    if (left > 0) device::BarrierWait(ring.full, ring.parity);
  }
  if (left > 0) {
    StageAddress address = at();
#pragma unroll 1
    for (; left > 0; --left) {
      MultiplyPairs<K, kCodebook, 1, NT, NT, 1>(address, c.shift, pair_inputs, acc);
      address.word0 += 2 * kRowBytes;
      address.word1 += 2 * kRowBytes;
      address.word2 += 2 * kRowBytes;
      address.b += pair_inputs;
    }
    ReleaseFew(c, ring);
  }
  const int rows = static_cast<int>(note.w & 0x7fffffffu);
  float* out =
      reinterpret_cast<float*>(static_cast<uint64_t>(note.y) << 32 | note.x) + warp * 16 + lane / 4;
#pragma unroll
  for (int g = 0; g < NT; ++g) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = g * kGroupRows + 2 * (lane & 3) + i;
      if (row < rows) {
        float* to = out + static_cast<int64_t>(row) * row_stride;
        to[0] = acc[0][g][i];
        to[8] = acc[0][g][2 + i];
      }
    }
  }
}

template <int K, int kCodebook, int NT>
__global__ void __launch_bounds__(kFewThreads, FewBlocksPerSm(NT))
    MoeFewKernel(const __grid_constant__ MoeFewArgs args) {
  extern __shared__ __align__(128) char few_shared[];
  FewHeader* header = reinterpret_cast<FewHeader*>(few_shared);
  const uint32_t shared = device::SharedAddress(few_shared);
  const int lane = static_cast<int>(threadIdx.x & 31);
  if (threadIdx.x == 0) {
    for (int i = 0; i < args.num_stages; ++i) {
      device::BarrierInit(shared + 8 * i, 1);
      device::BarrierInit(shared + 8 * i + kFewEmpty, device::kWarpArrivals * kWarps<1>);
    }
    device::FenceBarrierInit();
    header->warps_done = 0;
    // What follows reads nothing newer than the ids before it waits, unless there are early
    // experts.
    if (args.down || args.early_slots == 0) device::LaunchNext();
  }
  FewTasks tasks(args, threadIdx.x == kConsumers<1>);
  // The ids are older than the previous kernel.
  const FewRoute route = FewRouteAt(few_shared + args.route_offset, args.num_slots);
  SortFew(args, route);
  if (threadIdx.x >= kConsumers<1>) {
    ProduceFew<K>(args, route, tasks, shared);
    return;
  }
  const LaneWindow window = MakeLaneWindow<K>(lane);
  constexpr uint32_t kTile = kTileBytesPerBit * K;
  const uint32_t warp = threadIdx.x / 32;
  FewConsumer c = {
      shared,
      shared + 8 * static_cast<uint32_t>(args.num_stages),
      shared + kFewHeaderBytes + warp * kTile,
      static_cast<uint32_t>(args.stage_bytes),
      window.word0,
      window.word1,
      window.word2,
      window.shift,
      kFewStagePairs * 2 * 8 * kTile - warp * kTile + static_cast<uint32_t>(lane) * 16};
  for (uint32_t* v : {&c.first_full, &c.end_full, &c.first_data, &c.stage_bytes, &c.word0, &c.word1,
                      &c.shift, &c.inputs})
    Keep(*v);
  if constexpr (K > 4) Keep(c.word2);
  FewRing ring = {c.first_full, c.first_data, 0};
  const int row_stride = args.row_stride;
  // Whether the block may still get a task of an early expert.
  bool early = !args.down && args.early_slots != 0;
  while (true) {
    device::BarrierWait(ring.full, ring.parity);
    const uint4 note = device::LoadShared128(shared + kFewNotes + (ring.full - shared) * 2);
    if (early && (note.z == 0 || note.w >> 31 != 0)) {
      early = false;
      __threadfence();  // the sums are there for whoever starts after the last block has said so
      __syncwarp();
      if (lane == 0 && atomicAdd(&header->warps_done, 1u) == kWarps<1> - 1) device::LaunchNext();
    }
    if (note.z == 0) break;
    if (NT == 1 || note.z >> 16 == 1) {
      RunFewTask<K, kCodebook, 1>(c, note, row_stride, ring);
    } else {
      RunFewTask<K, kCodebook, NT>(c, note, row_stride, ring);
    }
  }
}

template <int K, int kCodebook, int NT>
int LaunchMoeFew(const MoeFewArgs& args, int grid, size_t shared_bytes, void* stream) {
  auto* kernel = &MoeFewKernel<K, kCodebook, NT>;
  const cudaError_t error = cudaFuncSetAttribute(
      kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return static_cast<int>(error);
  return static_cast<int>(LaunchDependent(kernel, grid, kFewThreads, shared_bytes, stream, args));
}

template <int K>
MoeFewLauncher PickMoeFew(int codebook, int groups) {
  if (codebook == kCodebookMul1) {
    return groups == 1 ? &LaunchMoeFew<K, kCodebookMul1, 1> : &LaunchMoeFew<K, kCodebookMul1, 3>;
  }
  if (codebook == kCodebookMcg) return &LaunchMoeFew<K, kCodebookMcg, 3>;
  return &LaunchMoeFew<K, kCodebook3Inst, 3>;
}

}  // namespace twinspark::exl3
