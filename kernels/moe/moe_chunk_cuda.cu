// Plans and launches of large chunks; see moe_chunk_plan_cuda.h.
#include "kernels/moe/moe_chunk_cuda.cuh"

#include <algorithm>

#include <cuda_runtime.h>

#include "kernels/cuda/launch_cuda.cuh"
#include "kernels/exl3/exl3_decode_cuda.cuh"
#include "kernels/moe/moe_chunk_plan_cuda.h"

namespace twinspark {
namespace {

using namespace exl3;  // NOLINT(google-build-using-namespace): one op, several files

constexpr int kRotateThreads = 256;
constexpr size_t kDriverShared = 1024;  // of a block, taken by the driver

struct RotateArgs {
  const void* x;
  int64_t x_stride;
  int32_t x_type;
  int32_t d;
  int32_t num_slots, num_chosen;
  const MoeExpert* experts;
  const int32_t* order;
  const MoePlace* places;
  char* xh;
  int64_t up_offset;
};

// 16 numbers of a row, by loads of 16 bytes where rows begin at such.
__device__ __forceinline__ void LoadRow16(const void* p, int type, float (&v)[16]) {
  if (type == kTypeF32 || reinterpret_cast<uintptr_t>(p) % 16 != 0) {
    Load16(p, type, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint4 raw = *(static_cast<const uint4*>(p) + i);
    const float4 a = ToFloat4(make_uint2(raw.x, raw.y), type);
    const float4 b = ToFloat4(make_uint2(raw.z, raw.w), type);
    v[8 * i] = a.x;
    v[8 * i + 1] = a.y;
    v[8 * i + 2] = a.z;
    v[8 * i + 3] = a.w;
    v[8 * i + 4] = b.x;
    v[8 * i + 5] = b.y;
    v[8 * i + 6] = b.z;
    v[8 * i + 7] = b.w;
  }
}

// A warp per sorted position, four blocks of 128 channels at a time: both inputs, gate's and up's.
__global__ void __launch_bounds__(kRotateThreads, 4)
    MoeRotateChunkKernel(const __grid_constant__ RotateArgs args) {
  device::WaitForPrevious();
  device::LaunchNext();
  const int lane = static_cast<int>(threadIdx.x & 31);
  const int position = static_cast<int>(blockIdx.x * (kRotateThreads / 32) + threadIdx.x / 32);
  if (position >= args.num_slots) return;
  const MoePlace place = args.places[position];
  const int row = args.order[position] / args.num_chosen;
  const MoeExpert& e = args.experts[place.expert];
  const __half* gate_suh = static_cast<const __half*>(e.gate_suh);
  const __half* up_suh = static_cast<const __half*>(e.up_suh);
  const char* x_row = RowPointer(args.x, args.x_type, args.x_stride, row);
  char* to =
      args.xh + static_cast<int64_t>(place.first_group) * (args.d / kChunkK) * kChunkAtomBytes;
#pragma unroll 2
  for (int first = 0; first < args.d; first += 32 * 16) {
    // Lanes past the end repeat the last block and store nothing.
    const int wanted = first + 16 * lane;
    const int channel = wanted < args.d ? wanted : args.d - kBlockN + (lane & 7) * 16;
    float x[16], v[16];
    LoadRow16(x_row + channel * (args.x_type == kTypeF32 ? 4 : 2), args.x_type, x);
    const int64_t low = ChunkInputByte(channel, place.num_groups, place.row);
    const int64_t high = ChunkInputByte(channel + 8, place.num_groups, place.row);
#pragma unroll
    for (int which = 0; which < 2; ++which) {
#pragma unroll
      for (int i = 0; i < 16; ++i)
        v[i] = x[i];
      float scale[16];
      LoadRow16((which == 0 ? gate_suh : up_suh) + channel, kTypeF16, scale);
#pragma unroll
      for (int i = 0; i < 16; ++i)
        v[i] *= scale[i];
      const Rotated16 r = RotateScaled16<0>(v, lane, false);
      if (wanted < args.d) {
        char* out = to + which * args.up_offset;
        *reinterpret_cast<uint4*>(out + low) =
            make_uint4(r.words[0], r.words[1], r.words[2], r.words[3]);
        *reinterpret_cast<uint4*>(out + high) =
            make_uint4(r.words[4], r.words[5], r.words[6], r.words[7]);
      }
    }
  }
}

MoeChunkLauncher FindChunk(int bits) {
  constexpr MoeChunkLauncher kLaunchers[] = {
      &LaunchMoeChunkK1, &LaunchMoeChunkK2, &LaunchMoeChunkK3, &LaunchMoeChunkK4,
      &LaunchMoeChunkK5, &LaunchMoeChunkK6, &LaunchMoeChunkK7, &LaunchMoeChunkK8};
  return kLaunchers[bits - 1];
}

// Ring and sums in shared memory for up to `rows` rows of an entry; 0 if they do not fit.
size_t LayOutChunkShared(const CudaDevice& device, int bits, int rows, MoeChunkArgs* args) {
  const int groups = std::min(kChunkTileGroups, (rows + 2 * kGroupRows - 1) / (2 * kGroupRows) * 2);
  const size_t weights = size_t{2} * kChunkTileRows * 8 * kTileBytesPerBit * bits;
  args->input_offset = static_cast<int32_t>(weights);
  args->input_bytes = groups * kChunkAtomBytes;
  const size_t stage = weights + (args->down ? 1 : 2) * static_cast<size_t>(args->input_bytes);
  args->stage_bytes = static_cast<int32_t>(stage);
  args->second_z = groups * kGroupRows * kChunkZStride;
  const size_t z = 2 * static_cast<size_t>(args->second_z) * sizeof(float);
  const size_t budget =
      std::min(device.shared_bytes_per_block, device.shared_bytes_per_sm - kDriverShared);
  if (budget < kChunkHeaderBytes + z + 2 * stage) return 0;
  const size_t stages = std::min<size_t>(kChunkMaxStages, (budget - kChunkHeaderBytes - z) / stage);
  args->num_stages = static_cast<int32_t>(stages);
  args->z_offset = static_cast<int32_t>(kChunkHeaderBytes + stages * stage);
  return static_cast<size_t>(args->z_offset) + z;
}

bool EvenCuts(const GemmArgs& args) {
  return std::all_of(args.segment_begin, args.segment_begin + args.num_segments + 1,
                     [](uint16_t begin) { return begin % 2 == 0; });
}

MoeChunkArgs MakeArgs(const MoeCudaParams& p, const GemmArgs& cut, bool down) {
  MoeChunkArgs args{};
  args.down = down;
  args.steps = cut.pairs / 2;
  args.num_blocks = cut.num_blocks;
  args.num_segments = cut.num_segments;
  for (int s = 0; s <= cut.num_segments; ++s)
    args.segment_begin[s] = cut.segment_begin[s] / 2;
  args.by_tasks = MakeDivisor(down ? (cut.num_blocks + 1) / 2 : cut.num_blocks);
  args.experts = p.experts;
  args.limit = p.limit;
  args.round_gate_up = p.round_gate_up;
  args.round_activation = p.round_activation;
  args.down_steps = p.inner / kChunkK;
  return args;
}

CudaStatus LaunchProduct(
    const MoeCudaParams& p, const CudaDevice& device, int bits, MoeChunkArgs args, void* stream) {
  const size_t shared_bytes = LayOutChunkShared(device, bits, p.rows, &args);
  const auto error =
      static_cast<cudaError_t>(FindChunk(bits)(args, device.num_sms, shared_bytes, stream));
  if (error != cudaSuccess) {
    return CudaError(error, "moe chunk product K = %d: %s", bits, cudaGetErrorString(error));
  }
  return {};
}

}  // namespace

bool MoeChunkFits(const MoeCudaParams& params,
                  const CudaDevice& device,
                  const GemmArgs& gate_up,
                  const GemmArgs& down) {
  MoeChunkArgs a = MakeArgs(params, gate_up, false), b = MakeArgs(params, down, true);
  return device.compute_capability == 90 && params.codebook == kCodebookMul1 && EvenCuts(gate_up) &&
         EvenCuts(down) && LayOutChunkShared(device, params.gate_up_bits, params.rows, &a) > 0 &&
         LayOutChunkShared(device, params.down_bits, params.rows, &b) > 0;
}

CudaStatus RunMoeChunkProducts(const MoeCudaParams& params,
                               const CudaDevice& device,
                               const GemmArgs& gate_up,
                               const GemmArgs& down,
                               const MoeChunkBuffers& buffers,
                               void* stream) {
  RotateArgs rotate{};
  rotate.x = params.x;
  rotate.x_stride = params.x_stride;
  rotate.x_type = params.x_type;
  rotate.d = params.d;
  rotate.num_slots = params.rows * params.num_chosen;
  rotate.num_chosen = params.num_chosen;
  rotate.experts = params.experts;
  rotate.order = buffers.order;
  rotate.places = buffers.places;
  rotate.xh = static_cast<char*>(buffers.xh);
  rotate.up_offset = buffers.group_capacity * (params.d / kChunkK) * kChunkAtomBytes;
  const int64_t threads = int64_t{rotate.num_slots} * 32;
  const cudaError_t error =
      LaunchDependent(&MoeRotateChunkKernel, (threads + kRotateThreads - 1) / kRotateThreads,
                      kRotateThreads, 0, stream, rotate);
  if (error != cudaSuccess) {
    return CudaError(error, "moe rotate: %s", cudaGetErrorString(error));
  }
  MoeChunkArgs args = MakeArgs(params, gate_up, false);
  args.entries = buffers.entries;
  args.num_entries = buffers.num_entries;
  args.counters = buffers.counters;
  args.xh = buffers.xh;
  args.up_offset = rotate.up_offset;
  args.xh_down = buffers.xh_down;
  if (CudaStatus status = LaunchProduct(params, device, params.gate_up_bits, args, stream);
      !status.ok()) {
    return status;
  }
  args = MakeArgs(params, down, true);
  args.entries = buffers.entries;
  args.num_entries = buffers.num_entries;
  args.counters = buffers.counters;
  args.xh = buffers.xh_down;
  args.order = buffers.order;
  args.slot_out = buffers.slot_out;
  return LaunchProduct(params, device, params.down_bits, args, stream);
}

}  // namespace twinspark
