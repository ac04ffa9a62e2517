// Rotation of a block's own inputs into shared memory, where the product reads them: rows x the
// 128-channel blocks that a task's segments touch, laid out like streamed inputs ([pair][group],
// exl3_rotate_cuda.cuh). A warp's job is one row (few rows: latency counts) or four rows (more: it
// counts how few exchanges there are) of one 128-channel block.
//
// `wait` is called once by every thread, after everything that does not depend on the previous
// kernel and before x is read. `store(address, value)` puts 4 or 16 bytes into shared memory.
#pragma once

#include "kernels/device/ptx.cuh"
#include "kernels/exl3/exl3_rotate_cuda.cuh"

namespace twinspark::exl3 {

// Rows from which four at a time are faster.
inline constexpr int kRotateQuadRows = 3;

// Jobs `first`, `first + step`, .. of (block, row or four rows), counted block by block; no
// divisions on the way.
struct RotateJob {
  int block, group;  // of num_blocks; row or four rows
};
__device__ __forceinline__ bool NextJob(RotateJob* job, int step, int num_groups, int num_blocks) {
  job->group += step;
  while (job->group >= num_groups) {
    job->group -= num_groups;
    ++job->block;
  }
  return job->block < num_blocks;
}

template <class Store, class Wait>
__device__ __forceinline__ void RotateSingleRows(const GemmArgs& args,
                                                 const GemmMatrix& input,
                                                 int begin,
                                                 int end,
                                                 uint32_t resident,
                                                 int first,
                                                 int step,
                                                 Store store,
                                                 Wait wait) {
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int first_col = begin / 4 * kBlockN + 4 * lane, num_blocks = (end + 3) / 4 - begin / 4;
  auto load = [&](const RotateJob& job) {
    return LoadRow4(RowPointer(input.x, args.x_type, input.x_stride, job.group), args.x_type,
                    first_col + job.block * kBlockN, input.x_cols);
  };
  auto rotate = [&](const RotateJob& job, float4 x, float4 scale) {
    const uint2 words = RotateInput(x, scale, lane, args.rounding_upstream != 0);
    const int pair = (first_col + job.block * kBlockN) / kPairK - begin;
    if (pair < 0 || pair >= end - begin) return;
    const uint32_t at =
        resident +
        static_cast<uint32_t>((pair * args.num_groups + job.group / kGroupRows) * kPairBytes +
                              FragmentWord(lane, job.group % kGroupRows) * 4);
    store(at, words.x);
    store(at + 16, words.y);
  };
  // Two jobs are in flight.
  RotateJob a = {0, 0}, b;
  bool has_a = NextJob(&a, first, args.rows, num_blocks), waited = false;
#pragma unroll 1
  do {
    b = a;
    const bool has_b = has_a && NextJob(&b, step, args.rows, num_blocks);
    float4 scale_a = {}, scale_b = {}, x_a = {}, x_b = {};
    if (has_a) scale_a = LoadHalf4(input.suh, first_col + a.block * kBlockN);
    if (has_b) scale_b = LoadHalf4(input.suh, first_col + b.block * kBlockN);
    if (!waited) wait();
    waited = true;
    if (has_a) x_a = load(a);
    if (has_b) x_b = load(b);
    if (has_a) rotate(a, x_a, scale_a);
    if (has_b) rotate(b, x_b, scale_b);
    a = b;
    has_a = has_b && NextJob(&a, step, args.rows, num_blocks);
  } while (has_a);
}

// 16 neighbouring channels of 2-byte numbers as they are stored.
struct Raw16 {
  uint2 v[4];
};
__device__ __forceinline__ Raw16 LoadRaw16(const void* row, int col, int cols) {
  Raw16 raw;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    raw.v[i] = make_uint2(0, 0);
    if (col + 4 * i < cols) {
      raw.v[i] = *reinterpret_cast<const uint2*>(static_cast<const __half*>(row) + col + 4 * i);
    }
  }
  return raw;
}
__device__ __forceinline__ void ToFloat(const Raw16& raw, int type, float (&x)[16]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint2 v = raw.v[i];
    if (type == kTypeF16) {
      const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&v.x));
      const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&v.y));
      x[4 * i] = a.x;
      x[4 * i + 1] = a.y;
      x[4 * i + 2] = b.x;
      x[4 * i + 3] = b.y;
    } else {
      x[4 * i] = __uint_as_float(v.x << 16);
      x[4 * i + 1] = __uint_as_float(v.x & 0xffff0000u);
      x[4 * i + 2] = __uint_as_float(v.y << 16);
      x[4 * i + 3] = __uint_as_float(v.y & 0xffff0000u);
    }
  }
}

// x is f16 or bf16. Lanes 4 c + r: row r of four, channels 16 c .. 16 c + 15.
template <class Store, class Wait>
__device__ __forceinline__ void RotateFourRows(const GemmArgs& args,
                                               const GemmMatrix& input,
                                               int begin,
                                               int end,
                                               uint32_t resident,
                                               int first,
                                               int step,
                                               Store store,
                                               Wait wait) {
  constexpr int kShift = 2;
  const int lane = static_cast<int>(threadIdx.x & 31), chunk = lane >> kShift;
  const int first_col = begin / 4 * kBlockN + chunk * 16, num_blocks = (end + 3) / 4 - begin / 4;
  const int num_groups = (args.rows + 3) / 4;
  auto load = [&](const RotateJob& job) {
    const int row = min(job.group * 4 + (lane & 3), args.rows - 1);
    return LoadRaw16(RowPointer(input.x, args.x_type, input.x_stride, row),
                     first_col + job.block * kBlockN, input.x_cols);
  };
  RotateJob job = {0, 0}, next;
  bool has = NextJob(&job, first, num_groups, num_blocks);
  int scaled = -1;  // block whose scales are in `scale`
  Raw16 scale = {}, raw = {};
  if (has) {
    scale = LoadRaw16(input.suh, first_col + job.block * kBlockN, args.pairs * kPairK);
    scaled = job.block;
  }
  wait();
  if (has) raw = load(job);
#pragma unroll 1
  for (; has; job = next) {
    float x[16], by[16];
    if (scaled != job.block) {
      scale = LoadRaw16(input.suh, first_col + job.block * kBlockN, args.pairs * kPairK);
      scaled = job.block;
    }
    ToFloat(raw, args.x_type, x);
    ToFloat(scale, kTypeF16, by);
#pragma unroll
    for (int i = 0; i < 16; ++i)
      x[i] *= by[i];
    next = job;
    has = NextJob(&next, step, num_groups, num_blocks);
    if (has) raw = load(next);  // in flight
    const Fragments16 out =
        SwapHalves<kShift>(RotateScaled16<kShift>(x, lane, args.rounding_upstream != 0), lane);
    const int row = job.group * 4 + (lane & 3);
    const int pair = (first_col + job.block * kBlockN) / kPairK - begin;
    if (pair < 0 || pair >= end - begin || row >= args.rows) continue;
    const uint32_t at =
        resident + static_cast<uint32_t>((pair * args.num_groups + row / kGroupRows) * kPairBytes +
                                         (row % kGroupRows) * 64 + (chunk & 1) * 32);
    store(at, out.v[0]);
    store(at + 16, out.v[1]);
  }
}

// All rows of a launch (one tile of rows) x pairs [begin, end) of a matrix's input; jobs as above.
template <class Store, class Wait>
__device__ __forceinline__ void RotateInputs(const GemmArgs& args,
                                             const GemmMatrix& input,
                                             int begin,
                                             int end,
                                             uint32_t resident,
                                             int first,
                                             int step,
                                             Store store,
                                             Wait wait) {
  if (args.rows >= kRotateQuadRows && args.x_type != kTypeF32) {
    RotateFourRows(args, input, begin, end, resident, first, step, store, wait);
  } else {
    RotateSingleRows(args, input, begin, end, resident, first, step, store, wait);
  }
}

}  // namespace twinspark::exl3
