// y = x W for EXL3 matrices in device memory: one matrix, or up to 8 of one k, K and codebook in
// one call (gate and up; wq_a and wkv; the slices of wo_a), 1 to 8,192 rows. Each matrix has its
// own input, output and vectors.
//
//   xh = f16(Hadamard(x * suh) / sqrt(128)),  z = xh Wq (order: exl3_gemm_cuda.h),
//   y = round(Hadamard(z) / sqrt(128) * svh + bias)
//
// A row's bits depend on the call's shape (k, sum of n, or `num_segments`) and on nothing else: not
// on the number of rows, the path, the other rows or the device's other work. The f32 rotation and
// one rounding of xh are the kF16 rounding of the CPU op. Thread-compatible; one workspace per
// stream.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/cuda/workspace_cuda.h"
#include "kernels/exl3/exl3_gemm_cuda.h"

namespace twinspark {

// Ways through a call of up to 48 rows; the results are the same on all of them.
enum class LinearPath : int32_t {
  kAuto,
  kTasks,             // tasks in rounds, segment sums through scratch
  kTasksOfTwo,        // two blocks of outputs a task, up to 24 rows
  kTasksWarpgroup,    // x rotated before; the tensor instructions of compute capability 9.0
  kClusters,          // segment sums meet inside a cluster; blocks rotate their own input
  kClustersOfTwo,     // two blocks of outputs a task, up to 24 rows
  kClustersStreamed,  // a kernel before rotates x
  kClustersOfTwoStreamed,
};
inline constexpr int kNumLinearPaths = 8;

struct Exl3LinearCudaParams {
  int32_t k = 0;         // inputs, a multiple of 128
  int32_t bits = 0;      // 1..8
  int32_t codebook = 2;  // 0 3inst, 1 mcg, 2 mul1
  int32_t rows = 0;
  int32_t x_type = exl3::kTypeBf16;
  int32_t y_type = exl3::kTypeBf16;
  int32_t num_matrices = 1;
  exl3::GemmMatrix matrices[exl3::kMaxMatrices] = {};  // first_unit is filled by the op
  int32_t num_segments = 0;                            // 0: Exl3Segments(k, sum of n / 128)
  bool rounding_upstream = false;                      // golden comparison only
  // For checks and measurements: a path that the call does not have is refused. kAuto: the plan
  // chooses.
  LinearPath path = LinearPath::kAuto;
};

inline constexpr int kMaxLinearRows = 8192;

// How the inputs are cut for a shape: the one choice that is part of the result. Made for the SM
// count of the reference card and the same on every device.
int Exl3Segments(int k, int num_units);

// Fills device->cluster_places from the driver's answers for the current device. Without it no
// clusters are used.
void Exl3ClusterPlaces(CudaDevice* device);

struct Exl3LinearPlan {
  exl3::GemmArgs args;
  exl3::TaskForm form;
  int kernel_groups;
  int grid;
  int cluster;        // blocks of a cluster; 0: none
  int rotate_blocks;  // least blocks of the kernel that rotates before
  size_t shared_bytes;
  size_t xh_bytes, partial_bytes;  // of the workspace, after the counters
};

// Everything the launch needs, decided on the host; fails on impossible shapes. Pure.
CudaStatus PlanExl3Linear(const Exl3LinearCudaParams& params,
                          const CudaDevice& device,
                          Exl3LinearPlan* plan);

// Workspace bytes of a call with at most `rows` rows.
size_t Exl3LinearWorkspaceBytes(const Exl3LinearCudaParams& params,
                                const CudaDevice& device,
                                int rows);

// Enqueues one to three kernels on `stream` (a cudaStream_t). Capturable; never synchronises.
CudaStatus Exl3LinearCuda(const Exl3LinearCudaParams& params,
                          const CudaDevice& device,
                          const CudaWorkspace& workspace,
                          void* stream);

// Reorders a stored trellis [k/16, n/16, 32 K bytes] into [n/128, k/16, 8, 32 K bytes]
// (GemmMatrix). A permutation of 256 K byte runs, made once at load; a rank's column slice is cut
// by `stored_n` and `first_column` (multiples of 128). `stored` and `prepared` are different device
// buffers.
CudaStatus Exl3PrepareCuda(const void* stored,
                           int stored_n,
                           int first_column,
                           int k,
                           int n,
                           int bits,
                           void* prepared,
                           void* stream);

// The decoded matrix, f16 or bf16 [k, n]: `original_basis` false gives Wq (exact in f16), true
// gives W = diag(suh) B Wq B diag(svh), one rounding.
struct Exl3ReconstructCudaParams {
  int32_t k = 0, n = 0, bits = 0, codebook = 2;
  exl3::GemmMatrix matrix = {};  // trellis, suh, svh
  void* out = nullptr;
  int64_t out_stride = 0;
  int32_t out_type = exl3::kTypeF16;
  bool original_basis = false;
};
CudaStatus Exl3ReconstructCuda(const Exl3ReconstructCudaParams& params, void* stream);

}  // namespace twinspark
