// Hadamard128 for callers outside the EXL3 linear (which inlines the block transform).
#include "kernels/exl3/hadamard.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/exl3/hadamard_cpu.cc"
#include "hwy/foreach_target.h"
// Highway needs its headers after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/exl3/hadamard-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {

void HadamardBlocks(float* values, int64_t num_blocks) {
  for (int64_t i = 0; i < num_blocks; ++i)
    HadamardBlock(values + i * kHadamardBlock);
}

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {

HWY_EXPORT(HadamardBlocks);

void Hadamard128(float* values, int64_t num_blocks) {
  HWY_DYNAMIC_DISPATCH(HadamardBlocks)(values, num_blocks);
}

}  // namespace twinspark
#endif  // HWY_ONCE
