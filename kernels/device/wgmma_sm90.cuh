// Warpgroup tensor instructions of compute capability 9.0 (sm_90a): f16, A in registers, B in
// shared memory, f32 accumulators. Asynchronous: registers and shared memory of an instruction stay
// untouched until a wait says that it is done. Device code only; other architectures never call it.
//
// The A operand of warp w of the four is the fragment that mma.m16n8k16 takes for rows 16w ..
// 16w+15, accumulators [4 j + i] are those of its 8 columns 8j .., and the bits of a chain of k16
// steps are the same (checked: moe chunks against few rows).
#pragma once

#include <cstdint>

namespace twinspark::device {

// Registers written before are visible to the instructions that follow; once before each that reads
// registers written since the last.
__device__ __forceinline__ void WarpgroupFence() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void WarpgroupCommit() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// Until at most `kPending` committed groups are still running.
template <int kPending>
__device__ __forceinline__ void WarpgroupWait() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
#endif
}
// Registers of a thread from here on; whole warpgroups.
template <int kCount>
__device__ __forceinline__ void TakeRegisters() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ __forceinline__ void ReleaseRegisters() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
// Keeps the compiler from moving uses of the accumulators across a fence or wait.
template <int kCount>
__device__ __forceinline__ void PinRegisters(float (&d)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    asm volatile("" : "+f"(d[i])::"memory");
}

// B: rows of 64 f16 (one k64 block), 128 bytes each, eight of them an atom of 1,024 bytes whose
// 16-byte pieces are exchanged by row (piece p of row r stands at p ^ r); atoms of 8 rows follow
// one another. `address16`: of the first atom (a multiple of 1,024) / 16; a k16 step further is
// + 2.
__device__ __forceinline__ uint64_t SwizzledTile(uint32_t address16) {
  constexpr uint32_t kSwizzle128 = uint32_t{1} << 30;
  constexpr uint32_t kAtomStride = 1024 / 16;
  constexpr uint32_t kUnused = uint32_t{1} << 16;
  uint64_t tile;
  asm("mov.b64 %0, {%1, %2};"
      : "=l"(tile)
      : "r"(address16 + kUnused), "n"(kSwizzle128 | kAtomStride));
  return tile;
}

// B without that exchange: rows of 8 f16, 8 rows side by side (128 bytes), the two k8 halves of a
// k16 step one behind the other; `address16`: of a step's first 8 rows / 16, the next 8 rows are
// `kGroupStride` bytes further.
template <uint32_t kGroupStride>
__device__ __forceinline__ uint64_t PlainTile(uint32_t address16) {
  constexpr uint32_t kHalfStride = uint32_t{128 / 16} << 16;
  constexpr uint32_t kAddressMask = 0x3fff;  // in a cluster the address has the block's rank on top
  uint64_t tile;
  asm("mov.b64 %0, {%1, %2};"
      : "=l"(tile)
      : "r"((address16 & kAddressMask) + kHalfStride), "n"(kGroupStride / 16));
  return tile;
}

// d += a b for 64 x 16 by 16 x 8 kGroups, kGroups even, 2 .. 12; d may have more than its 4
// kGroups.
template <int kGroups, int kCount>
__device__ __forceinline__ void WarpgroupMma(float (&d)[kCount],
                                             const uint32_t (&a)[4],
                                             uint64_t b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define TS_OUT8(i)                                                                            \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), \
      "+f"(d[i + 6]), "+f"(d[i + 7])
#define TS_IN "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b)
#define TS_D0 "%0, %1, %2, %3, %4, %5, %6, %7"
#define TS_D1 TS_D0 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define TS_D2 TS_D1 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define TS_D3 TS_D2 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define TS_D4 TS_D3 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define TS_D5 TS_D4 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define TS_MMA(n, out, in)                       \
  "{\n.reg .pred add;\nsetp.eq.u32 add, 0, 0;\n" \
  "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" out "}, " in ", add, 1, 1, 0;\n}"
  static_assert(kGroups % 2 == 0 && kGroups >= 2 && kGroups <= 12 && kCount >= 4 * kGroups);
  if constexpr (kGroups == 2) {
    asm volatile(TS_MMA("16", TS_D0, "{%8, %9, %10, %11}, %12") : TS_OUT8(0) : TS_IN);
  } else if constexpr (kGroups == 4) {
    asm volatile(TS_MMA("32", TS_D1, "{%16, %17, %18, %19}, %20") : TS_OUT8(0), TS_OUT8(8) : TS_IN);
  } else if constexpr (kGroups == 6) {
    asm volatile(TS_MMA("48", TS_D2, "{%24, %25, %26, %27}, %28")
                 : TS_OUT8(0), TS_OUT8(8), TS_OUT8(16)
                 : TS_IN);
  } else if constexpr (kGroups == 8) {
    asm volatile(TS_MMA("64", TS_D3, "{%32, %33, %34, %35}, %36")
                 : TS_OUT8(0), TS_OUT8(8), TS_OUT8(16), TS_OUT8(24)
                 : TS_IN);
  } else if constexpr (kGroups == 10) {
    asm volatile(TS_MMA("80", TS_D4, "{%40, %41, %42, %43}, %44")
                 : TS_OUT8(0), TS_OUT8(8), TS_OUT8(16), TS_OUT8(24), TS_OUT8(32)
                 : TS_IN);
  } else {
    asm volatile(TS_MMA("96", TS_D5, "{%48, %49, %50, %51}, %52")
                 : TS_OUT8(0), TS_OUT8(8), TS_OUT8(16), TS_OUT8(24), TS_OUT8(32), TS_OUT8(40)
                 : TS_IN);
  }
#undef TS_OUT8
#undef TS_IN
#undef TS_D0
#undef TS_D1
#undef TS_D2
#undef TS_D3
#undef TS_D4
#undef TS_D5
#undef TS_MMA
#endif
}

}  // namespace twinspark::device
