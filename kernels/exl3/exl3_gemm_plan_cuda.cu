// Shared memory layout of the product kernel and the table of its instances.
#include "kernels/exl3/exl3_gemm_plan_cuda.h"

#include <algorithm>

#include "kernels/exl3/exl3_cluster_cuda.cuh"
#include "kernels/exl3/exl3_gemm_cuda.cuh"

namespace twinspark::exl3 {
namespace {

constexpr int kMaxRing = 8;                 // stages; more were not faster
constexpr size_t kLeastStages = 3;          // of a ring beside another block
constexpr size_t kReservedPerBlock = 1024;  // what the driver takes of every block's share

size_t RoundUp(size_t bytes) {
  return (bytes + 127) / 128 * 128;
}

// Reduces args->ahead_stages to less than the shortest segment has and to what fits beside a ring
// of the least size; returns the bytes of shared memory that the decoded tiles take.
size_t PlanAhead(int kernel_groups, size_t stage, size_t budget, GemmArgs* args) {
  if (args->ahead_stages == 0) return 0;
  constexpr size_t kDecodedTile = 512;
  const size_t pair_bytes = static_cast<size_t>(args->task_units) * 2 * 8 * kDecodedTile;
  const int stage_pairs = StagePairs(kernel_groups);
  const int kept = KeptPairs(args->task_units, kernel_groups);
  // One group of rows takes little of the ring, and a shorter one was slower.
  const size_t least_stages = kernel_groups == 1 && args->task_units == 1 ? 4 : kLeastStages;
  int shortest = args->pairs;
  for (int s = 0; s < args->num_segments; ++s) {
    shortest = std::min(shortest, args->segment_begin[s + 1] - args->segment_begin[s]);
  }
  // Streamed inputs come into the stages of their weights, which wait for them in the ring.
  const auto bytes = [&](int stages) {
    return static_cast<size_t>(stages * stage_pairs - kept) * pair_bytes;
  };
  int stages = std::min(args->ahead_stages, kMaxAheadStages);
  while (stages > 0 &&
         (stages * stage_pairs >= shortest ||
          std::max(least_stages, static_cast<size_t>(stages)) * stage + bytes(stages) > budget)) {
    --stages;
  }
  args->ahead_stages = stages;
  return stages == 0 ? 0 : bytes(stages);
}

}  // namespace

CudaStatus LayOutShared(const CudaDevice& device,
                        int bits,
                        int kernel_groups,
                        int longest_pairs,
                        GemmArgs* args,
                        size_t* shared_bytes) {
  const size_t units = static_cast<size_t>(args->task_units);
  const size_t pair_weights = units * 2 * 8 * static_cast<size_t>(kTileBytesPerBit) * bits;
  const size_t pair_inputs = args->resident ? 0 : static_cast<size_t>(kernel_groups) * kPairBytes;
  const size_t resident =
      args->resident ? RoundUp(static_cast<size_t>(kernel_groups) * longest_pairs * kPairBytes) : 0;
  size_t z = 0;  // rows of outputs, or the sums of earlier segments
  if (args->whole && args->kind == GemmKind::kLinear) {
    z = units * static_cast<size_t>(kernel_groups) * kGroupRows * kZStride * sizeof(float);
  }
  if (args->whole && args->num_segments > 1) {
    z = std::max(z,
                 units * static_cast<size_t>(kernel_groups) * kGroupRows * kBlockN * sizeof(float));
  }
  z = RoundUp(z);
  const size_t fixed = kSharedHeaderBytes + resident + z;
  const int stage_pairs = StagePairs(kernel_groups);
  const size_t stage = RoundUp(stage_pairs * (pair_weights + pair_inputs));
  // As many blocks per SM as registers allow if a ring of four stages fits; in the end one with
  // two.
  for (int blocks = BlocksByRegisters(kernel_groups); blocks >= 1; --blocks) {
    const size_t budget =
        std::min(device.shared_bytes_per_block,
                 device.shared_bytes_per_sm / blocks - kReservedPerBlock -
                     (args->kind == GemmKind::kLinear && !args->resident ? kReservedPerBlock : 0));
    if (fixed + (blocks >= 3 ? 4 : blocks == 2 ? 3 : 2) * stage > budget) continue;
    const size_t ahead = PlanAhead(kernel_groups, stage, budget - fixed, args);
    args->num_stages = static_cast<int>(
        std::min<size_t>((budget - fixed - ahead) / stage, static_cast<size_t>(kMaxRing)));
    args->stage_bytes = static_cast<int>(stage);
    size_t offset = kSharedHeaderBytes + args->num_stages * stage;
    args->resident_offset = static_cast<int>(offset);
    offset += resident;
    args->z_offset = static_cast<int>(offset);
    offset += z;
    args->ahead_offset = static_cast<int>(offset);
    *shared_bytes = offset + ahead;
    return {};
  }
  return CudaError(-1, "exl3: %d row groups at K = %d need more shared memory than %zu bytes",
                   kernel_groups, bits, device.shared_bytes_per_block);
}

CudaStatus LayOutCluster(const CudaDevice& device,
                         int bits,
                         int kernel_groups,
                         int longest_pairs,
                         GemmArgs* args,
                         size_t* shared_bytes,
                         int* blocks_per_sm) {
  const size_t groups = static_cast<size_t>(kernel_groups);
  const size_t units = static_cast<size_t>(args->task_units);
  const size_t pair_weights = units * 2 * 8 * static_cast<size_t>(kTileBytesPerBit) * bits;
  const size_t stage = RoundUp(StagePairs(kernel_groups) *
                               (pair_weights + (args->resident ? 0 : groups * kPairBytes)));
  const size_t resident =
      args->resident ? groups * static_cast<size_t>(longest_pairs) * kPairBytes : 0;
  const int slots = (args->rows + args->num_segments - 1) / args->num_segments;
  const size_t buffer =
      static_cast<size_t>(slots) * args->num_segments * units * kBlockN * sizeof(float);
  const size_t fixed = kSharedHeaderBytes + resident + buffer;
  for (int blocks = 2; blocks >= 1; --blocks) {
    const size_t budget = std::min(device.shared_bytes_per_block,
                                   device.shared_bytes_per_sm / blocks - kReservedPerBlock -
                                       (args->resident ? 0 : kReservedPerBlock));  // to rotate
    if (fixed + kLeastStages * stage > budget) continue;
    const size_t ahead = PlanAhead(kernel_groups, stage, budget - fixed, args);
    args->num_stages = static_cast<int>(
        std::min<size_t>((budget - fixed - ahead) / stage, static_cast<size_t>(kMaxRing)));
    args->stage_bytes = static_cast<int>(stage);
    args->resident_offset = static_cast<int>(kSharedHeaderBytes + args->num_stages * stage);
    args->z_offset = args->resident_offset + static_cast<int>(resident);
    args->ahead_offset = args->z_offset + static_cast<int>(buffer);
    *shared_bytes = fixed + args->num_stages * stage + ahead;
    *blocks_per_sm = blocks;
    return {};
  }
  return CudaError(-1,
                   "exl3: a cluster for %d rows at K = %d needs more shared memory than %zu bytes",
                   args->rows, bits, device.shared_bytes_per_block);
}

int LaunchCluster(const void* kernel,
                  const GemmArgs& args,
                  int grid,
                  int cluster,
                  size_t shared_bytes,
                  void* stream) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                           static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return static_cast<int>(error);
  constexpr int kPortableCluster = 8;
  if (cluster > kPortableCluster) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (error != cudaSuccess) return static_cast<int>(error);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(grid));
  config.blockDim = dim3(kConsumers<1> + 32);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = static_cast<unsigned>(cluster);
  attributes[1].val.clusterDim.y = 1;
  attributes[1].val.clusterDim.z = 1;
  config.attrs = attributes;
  config.numAttrs = 2;
  void* parameters[] = {const_cast<GemmArgs*>(&args)};
  return static_cast<int>(cudaLaunchKernelExC(&config, kernel, parameters));
}

CudaStatus FinishArgs(GemmArgs* args) {
  if (args->num_segments < 1 || args->num_segments > kMaxSegments ||
      args->num_segments > args->pairs || args->pairs > 0xffff) {
    return CudaError(-1, "exl3: %d segments of %d inputs", args->num_segments,
                     args->pairs * kPairK);
  }
  // Cuts at blocks of 128 inputs, so that no two segments rotate the same block, or at 64, unless
  // that makes the longest segment longer by more than a pair.
  const auto longest = [&](int unit) {
    return (args->pairs / unit + args->num_segments - 1) / args->num_segments * unit;
  };
  int unit = 4;
  while (unit > 1 && (args->pairs % unit != 0 || args->pairs / unit < args->num_segments ||
                      longest(unit) > longest(1) + 1)) {
    unit /= 2;
  }
  for (int s = 0; s <= args->num_segments; ++s) {
    args->segment_begin[s] =
        static_cast<uint16_t>(args->pairs / unit * s / args->num_segments * unit);
  }
  args->by_segments = MakeDivisor(args->num_segments);
  args->by_tiles = MakeDivisor(std::max(1, args->num_tiles));
  args->by_blocks = MakeDivisor(std::max(1, args->num_blocks));
  return {};
}

int BlocksPerSm(const CudaDevice& device, int kernel_groups, size_t shared_bytes) {
  const size_t fit = device.shared_bytes_per_sm / (shared_bytes + kReservedPerBlock);
  return std::clamp(static_cast<int>(fit), 1, BlocksByRegisters(kernel_groups));
}

GemmLauncher FindGemm(int bits, int codebook, int groups, bool wide) {
  switch (bits) {
    case 1:
      return GemmLauncherK1(codebook, groups, wide);
    case 2:
      return GemmLauncherK2(codebook, groups, wide);
    case 3:
      return GemmLauncherK3(codebook, groups, wide);
    case 4:
      return GemmLauncherK4(codebook, groups, wide);
    case 5:
      return GemmLauncherK5(codebook, groups, wide);
    case 6:
      return GemmLauncherK6(codebook, groups, wide);
    case 7:
      return GemmLauncherK7(codebook, groups, wide);
    case 8:
      return GemmLauncherK8(codebook, groups, wide);
    default:
      return nullptr;
  }
}

GemmLauncher FindFew(int bits, int groups, TaskForm form) {
  switch (bits) {
    case 1:
      return FewLauncherK1(groups, form);
    case 2:
      return FewLauncherK2(groups, form);
    case 3:
      return FewLauncherK3(groups, form);
    case 4:
      return FewLauncherK4(groups, form);
    case 5:
      return FewLauncherK5(groups, form);
    case 6:
      return FewLauncherK6(groups, form);
    case 7:
      return FewLauncherK7(groups, form);
    case 8:
      return FewLauncherK8(groups, form);
    default:
      return nullptr;
  }
}

const void* FindClusterKernel(int bits, int groups, TaskForm form) {
  if (form == TaskForm::kWarpgroup) return nullptr;
  const bool one = form == TaskForm::kOne;
  switch (bits) {
    case 1:
      return one ? ClusterKernelK1(groups) : ClusterOfTwoK1(groups);
    case 2:
      return one ? ClusterKernelK2(groups) : ClusterOfTwoK2(groups);
    case 3:
      return one ? ClusterKernelK3(groups) : ClusterOfTwoK3(groups);
    case 4:
      return one ? ClusterKernelK4(groups) : ClusterOfTwoK4(groups);
    case 5:
      return one ? ClusterKernelK5(groups) : ClusterOfTwoK5(groups);
    case 6:
      return one ? ClusterKernelK6(groups) : ClusterOfTwoK6(groups);
    case 7:
      return one ? ClusterKernelK7(groups) : ClusterOfTwoK7(groups);
    case 8:
      return one ? ClusterKernelK8(groups) : ClusterOfTwoK8(groups);
    default:
      return nullptr;
  }
}

}  // namespace twinspark::exl3

namespace twinspark {

void Exl3ClusterPlaces(CudaDevice* device) {
  const void* kernel = exl3::ClusterKernelK3(1);
  for (int blocks = 1; blocks <= 2; ++blocks) {
    const size_t shared_bytes =
        std::min(device->shared_bytes_per_block,
                 device->shared_bytes_per_sm / blocks - exl3::kReservedPerBlock);
    if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             static_cast<int>(shared_bytes)) != cudaSuccess ||
        cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
            cudaSuccess) {
      cudaGetLastError();
      return;
    }
    for (int size = 1; size <= kMaxClusterSize; ++size) {
      cudaLaunchConfig_t config{};
      config.gridDim = dim3(static_cast<unsigned>(size * device->num_sms));
      config.blockDim = dim3(exl3::kConsumers<1> + 32);
      config.dynamicSmemBytes = shared_bytes;
      cudaLaunchAttribute attribute{};
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = static_cast<unsigned>(size);
      attribute.val.clusterDim.y = 1;
      attribute.val.clusterDim.z = 1;
      config.attrs = &attribute;
      config.numAttrs = 1;
      int clusters = 0;
      if (cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
        cudaGetLastError();
        clusters = 0;
      }
      device->cluster_places[blocks - 1][size] = clusters;
    }
  }
}

}  // namespace twinspark
