// Thin names for the PTX instructions the kernels use: transaction barriers, bulk copies,
// programmatic dependent launch, named barriers and the f16 tensor instruction. Device code only;
// compute capability 9.0 and up (sm_90, sm_120, sm_121 have all of them). Nothing here knows a
// format.
#pragma once

#include <cstdint>

namespace twinspark::device {

__device__ __forceinline__ uint32_t SharedAddress(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// --- transaction barriers in shared memory ---

__device__ __forceinline__ void BarrierInit(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the copy engine.
__device__ __forceinline__ void FenceBarrierInit() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void BarrierArrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void BarrierArriveExpect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// A warp gives back what all its lanes have read: one arrival, by lane 0. racecheck does not see
// that
// __syncwarp orders the reads of the other lanes before it, so a build for racecheck lets every
// lane arrive (kernels/cuda/README.md).
#ifdef TWINSPARK_EVERY_LANE_ARRIVES
inline constexpr uint32_t kWarpArrivals = 32;
#else
inline constexpr uint32_t kWarpArrivals = 1;
#endif
__device__ __forceinline__ void WarpArrive(uint32_t barrier) {
  __syncwarp();
  if (kWarpArrivals == 32 || (threadIdx.x & 31) == 0) BarrierArrive(barrier);
}

// Waits until the phase of the given parity is over.
__device__ __forceinline__ void BarrierWait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra.uni over;\n"
      "bra.uni again;\n"
      "over:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- copies ---

// Global to shared memory by the copy engine; 16-byte aligned, a multiple of 16 bytes. Weights are
// read once per call, so they leave L2 first.
__device__ __forceinline__ uint64_t EvictFirstPolicy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

__device__ __forceinline__ void BulkCopy(uint32_t to,
                                         const void* from,
                                         uint32_t bytes,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

__device__ __forceinline__ void BulkCopyEvictFirst(
    uint32_t to, const void* from, uint32_t bytes, uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1], %2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}

// True in one lane of a warp, all of whose lanes are here; the compiler knows that it is one, so
// that copies by it need no loop over lanes.
__device__ __forceinline__ bool ElectOne() {
  uint32_t one;
  asm volatile(
      "{\n"
      ".reg .pred one;\n"
      "elect.sync _|one, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, one;\n"
      "}\n"
      : "=r"(one));
  return one != 0;
}

__device__ __forceinline__ void PrefetchL2(const void* p) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

// Orders ordinary accesses of global memory by this thread before and after with copies by the copy
// engine.
__device__ __forceinline__ void FenceCopies() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

// --- shared memory by 32-bit address ---

// Volatile, so that they stay behind the barrier wait before them.
__device__ __forceinline__ uint32_t LoadShared(uint32_t address) {
  uint32_t v;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ uint4 LoadShared128(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address));
  return v;
}

__device__ __forceinline__ void StoreShared(uint32_t address, uint32_t v) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ void StoreShared(uint32_t address, uint4 v) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

// --- order between and inside blocks ---

// One value for the warp; the compiler knows it to be uniform, and copies that take it need no loop
// over lanes.
template <class T>
__device__ __forceinline__ T Uniform(T v) {
  return __shfl_sync(0xffffffffu, v, 0);
}
template <class T>
__device__ __forceinline__ const T* Uniform(const T* p) {
  return reinterpret_cast<const T*>(Uniform(reinterpret_cast<unsigned long long>(p)));
}

// Threads of a subset of warps only; `id` 1..15.
__device__ __forceinline__ void NamedBarrier(int id, int num_threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(num_threads) : "memory");
}

__device__ __forceinline__ uint32_t AtomicAddAcquireRelease(uint32_t* p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;"
               : "=r"(old)
               : "l"(p), "r"(v)
               : "memory");
  return old;
}

// Programmatic dependent launch. Before WaitForPrevious only constant data may be read and nothing
// written; after LaunchNext the next kernel of the stream may start its own such prologue.
__device__ __forceinline__ void WaitForPrevious() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}
__device__ __forceinline__ void LaunchNext() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// --- clusters: blocks that are resident together and reach each other's shared memory ---

__device__ __forceinline__ uint32_t ClusterRank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Every thread of every block arrives once; whoever waits knows that all have, and sees what they
// wrote before. Threads that have exited count as arrived.
__device__ __forceinline__ void ClusterArrive() {
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
}
__device__ __forceinline__ void ClusterWait() {
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
}

// The address in block `rank` of what lies at `address` in this one.
__device__ __forceinline__ uint32_t MapShared(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
// Stores 16 bytes and adds 16 to the bytes that have come to `mapped_barrier`, which is in the same
// block: who waits there for all its bytes (BarrierWaitCluster) sees them.
__device__ __forceinline__ void SendShared(uint32_t mapped, uint4 v, uint32_t mapped_barrier) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
      "[%5];" ::"r"(mapped),
      "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(mapped_barrier)
      : "memory");
}

// BarrierWait for what came from other blocks.
__device__ __forceinline__ void BarrierWaitCluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// --- tensor core ---

// d += a b: 16 x 16 f16 (row major fragment) times 16 x 8 f16, f32 accumulators.
__device__ __forceinline__ void MmaF16(float (&d)[4],
                                       const uint32_t (&a)[4],
                                       uint32_t b0,
                                       uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace twinspark::device
