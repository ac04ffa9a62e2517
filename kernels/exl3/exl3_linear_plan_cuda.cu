// Plans of the EXL3 linear: how the inputs are cut, and which path a call takes. Host code, pure.
#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <iterator>

#include "kernels/exl3/exl3_gemm_plan_cuda.h"
#include "kernels/exl3/exl3_linear_cuda.h"

namespace twinspark {
namespace {

using namespace exl3;  // NOLINT(google-build-using-namespace): one op, two files

CudaStatus Validate(const Exl3LinearCudaParams& p) {
  if (p.k <= 0 || p.k % kBlockN != 0) {
    return CudaError(-1, "exl3 linear: k = %d is not a positive multiple of 128", p.k);
  }
  if (p.bits < 1 || p.bits > 8) return CudaError(-1, "exl3 linear: K = %d, not 1..8", p.bits);
  if (p.codebook < 0 || p.codebook > 2) {
    return CudaError(-1, "exl3 linear: codebook %d, not 0..2", p.codebook);
  }
  if (p.rows < 1 || p.rows > kMaxLinearRows) {
    return CudaError(-1, "exl3 linear: %d rows, not 1..%d", p.rows, kMaxLinearRows);
  }
  if (p.num_matrices < 1 || p.num_matrices > kMaxMatrices) {
    return CudaError(-1, "exl3 linear: %d matrices, not 1..%d", p.num_matrices, kMaxMatrices);
  }
  for (int i = 0; i < p.num_matrices; ++i) {
    const GemmMatrix& m = p.matrices[i];
    if (m.num_blocks < 1) return CudaError(-1, "exl3 linear: matrix %d has no outputs", i);
    if (m.x_cols < 4 || m.x_cols > p.k || m.x_cols % 4 != 0 || m.x_stride % 4 != 0) {
      return CudaError(-1,
                       "exl3 linear: matrix %d: %d input columns (stride %lld), want a multiple "
                       "of 4 up to k = %d",
                       i, m.x_cols, static_cast<long long>(m.x_stride), p.k);
    }
    if (m.y_cols < 4 || m.y_cols > m.num_blocks * kBlockN || m.y_cols % 4 != 0 ||
        m.y_stride % 4 != 0) {
      return CudaError(-1,
                       "exl3 linear: matrix %d: %d output columns (stride %lld), want a multiple "
                       "of 4 up to n = %d",
                       i, m.y_cols, static_cast<long long>(m.y_stride), m.num_blocks * kBlockN);
    }
    for (const void* pointer : {static_cast<const void*>(m.trellis), m.suh, m.svh, m.bias, m.x,
                                static_cast<const void*>(m.y)}) {
      if (reinterpret_cast<uintptr_t>(pointer) % 16 != 0) {
        return CudaError(-1, "exl3 linear: matrix %d has a pointer that is not 16-byte aligned", i);
      }
    }
    if (m.trellis == nullptr || m.suh == nullptr || m.svh == nullptr || m.x == nullptr ||
        m.y == nullptr) {
      return CudaError(-1, "exl3 linear: matrix %d has a null pointer", i);
    }
  }
  return {};
}

// Largest number of rows of the paths with two blocks of outputs a task.
constexpr int kMaxRowsOfTwo = 24;

// Rows above which warpgroup instructions are faster.
constexpr int kWarpgroupRows = 24;

// What a path is made of.
struct Way {
  bool clusters, streamed;
  TaskForm form;
};
Way WayOf(LinearPath path) {
  switch (path) {
    case LinearPath::kTasksOfTwo:
      return {false, false, TaskForm::kTwo};
    case LinearPath::kTasksWarpgroup:
      return {false, true, TaskForm::kWarpgroup};
    case LinearPath::kClusters:
      return {true, false, TaskForm::kOne};
    case LinearPath::kClustersOfTwo:
      return {true, false, TaskForm::kTwo};
    case LinearPath::kClustersStreamed:
      return {true, true, TaskForm::kOne};
    case LinearPath::kClustersOfTwoStreamed:
      return {true, true, TaskForm::kTwo};
    default:
      return {false, false, TaskForm::kOne};
  }
}

// Whether the kernels of a way exist for the call; `args` has its cuts (FinishArgs).
bool HasWay(const Exl3LinearCudaParams& params,
            const CudaDevice& device,
            const GemmArgs& args,
            Way way) {
  if (way.form == TaskForm::kOne) return true;
  if (params.codebook != 2 || params.rows > kMaxFewRows) return false;
  if (way.form == TaskForm::kTwo) {  // both blocks have the same input
    if (params.rows > kMaxRowsOfTwo || args.num_units < 2) return false;
    for (int i = 0; args.num_matrices > 1 && i < args.num_matrices; ++i) {
      if (params.matrices[i].num_blocks % 2 != 0) return false;
    }
    return true;
  }
  if (device.compute_capability != 90) return false;
  for (int s = 0; s <= args.num_segments; ++s) {
    if (args.segment_begin[s] % 2 != 0) return false;
  }
  return true;
}

int LongestSegment(const GemmArgs& args) {
  int longest = 0;
  for (int s = 0; s < args.num_segments; ++s) {
    longest = std::max(longest, args.segment_begin[s + 1] - args.segment_begin[s]);
  }
  return longest;
}

// Groups a kernel of the form is compiled for.
int KernelGroups(const GemmArgs& args, TaskForm form) {
  const int groups = RoundGroups(args.tile_groups);
  return form == TaskForm::kWarpgroup ? std::max(4, groups) : groups;
}

size_t RotatedBytes(const GemmArgs& args) {
  return args.resident
             ? 0
             : static_cast<size_t>(args.num_matrices) * args.num_groups * args.pairs * kPairBytes;
}

// Stages that blocks in clusters decode ahead, as measured: many if the block starts long before
// the wait is over, that is with streamed inputs and where SMs are left; few otherwise.
int ClusterAhead(const GemmArgs& args, int kernel_groups, int grid, int num_sms) {
  if (!DecodesAhead(/*clusters=*/true, args.task_units, kernel_groups)) return 0;
  const bool beside = grid > num_sms;
  if (args.task_units == 2) return !args.resident || args.rows == 1 ? 1 : 0;
  constexpr int kLongSegment = 20;
  if (args.resident) {
    return beside ? 0 : args.rows > 1 && args.pairs >= kLongSegment * args.num_segments ? 2 : 1;
  }
  if (beside) return kernel_groups <= 2 ? 1 : 2;
  return kernel_groups <= 3 ? 3 : 0;
}

// Fills `plan` for clusters; false if that does not fit, all clusters at once.
bool PlanClusters(const Exl3LinearCudaParams& params,
                  const CudaDevice& device,
                  GemmArgs args,
                  Way way,
                  Exl3LinearPlan* plan) {
  if (params.codebook != 2 || args.rows > kMaxFewRows || args.num_segments < 2 ||
      args.num_segments > kMaxClusterSize || !HasWay(params, device, args, way)) {
    return false;
  }
  args.whole = 0;
  args.external_finish = 0;
  args.resident = !way.streamed;
  args.task_units = way.form == TaskForm::kTwo ? 2 : 1;
  plan->form = way.form;
  plan->kernel_groups = KernelGroups(args, way.form);
  const int tasks = (args.num_units + args.task_units - 1) / args.task_units;
  plan->grid = tasks * args.num_segments;
  args.ahead_stages = ClusterAhead(args, plan->kernel_groups, plan->grid, device.num_sms);
  int blocks_per_sm = 0;
  if (!LayOutCluster(device, params.bits, plan->kernel_groups, LongestSegment(args), &args,
                     &plan->shared_bytes, &blocks_per_sm)
           .ok() ||
      tasks > device.cluster_places[blocks_per_sm - 1][args.num_segments]) {
    return false;
  }
  plan->cluster = args.num_segments;
  // Where half of the SMs stay empty, one a SM was not enough; where all have work, none is needed.
  const int waiting = plan->grid > device.num_sms ? 0 : args.task_units == 2 ? 1 : 2;
  plan->rotate_blocks = waiting * device.num_sms;
  plan->xh_bytes = RotatedBytes(args);
  plan->partial_bytes = 0;
  plan->args = args;
  return true;
}

// Fills `plan` for tasks in rounds.
CudaStatus PlanTasks(const Exl3LinearCudaParams& params,
                     const CudaDevice& device,
                     GemmArgs args,
                     Way way,
                     Exl3LinearPlan* plan) {
  const TaskForm form = way.form;
  // One task per segment while whole outputs would leave SMs without work.
  args.whole = args.num_segments == 1 || args.num_units * args.num_tiles * 2 >= 3 * device.num_sms;
  if (!HasWay(params, device, args, way) ||
      (form != TaskForm::kOne && args.whole && args.num_segments > 1)) {
    return CudaError(-1, "exl3 linear: no tasks of this form for %d rows here", params.rows);
  }
  plan->form = form;
  plan->cluster = 0;
  plan->rotate_blocks = 0;
  const bool two = form == TaskForm::kTwo;
  args.task_units = two ? 2 : 1;
  args.warpgroup = form == TaskForm::kWarpgroup;
  args.external_finish = !args.whole && params.rows > kGroupRows;
  // Rotating in every block saves a launch (about 1 us); a block keeps its inputs if its next task
  // has the same segment.
  args.resident = params.rows <= kResidentRows && form != TaskForm::kWarpgroup;
  plan->kernel_groups = params.codebook == 2 ? KernelGroups(args, form) : kMaxTileGroups;
  args.ahead_stages =
      DecodesAhead(/*clusters=*/false, args.task_units, plan->kernel_groups) ? 1 : 0;
  const int longest = args.whole ? args.pairs : LongestSegment(args);
  if (args.resident &&
      static_cast<size_t>(plan->kernel_groups) * longest * kPairBytes > kResidentLimit) {
    args.resident = 0;
  }
  if (CudaStatus status = LayOutShared(device, params.bits, plan->kernel_groups, longest, &args,
                                       &plan->shared_bytes);
      !status.ok()) {
    return status;
  }
  const int64_t units = (args.num_units + args.task_units - 1) / args.task_units;
  const int64_t tasks = units * args.num_tiles * (args.whole ? 1 : args.num_segments);
  plan->grid = static_cast<int>(std::min<int64_t>(
      tasks, BlocksPerSm(device, plan->kernel_groups, plan->shared_bytes) * device.num_sms));
  // So that a block keeps its segment, and with it its rotated inputs.
  if (args.resident && !args.whole && plan->grid < tasks && plan->grid > args.num_segments) {
    plan->grid -= plan->grid % args.num_segments;
  }
  plan->xh_bytes = RotatedBytes(args);
  plan->partial_bytes = args.whole ? 0
                                   : static_cast<size_t>(args.num_units) * params.rows *
                                         args.num_segments * kBlockN * sizeof(float);
  if (static_cast<size_t>(args.num_units) * args.num_tiles * sizeof(uint32_t) > kCudaCounterBytes &&
      !args.whole) {
    return CudaError(-1, "exl3 linear: %d output blocks in one call", args.num_units);
  }
  plan->args = args;
  return {};
}

CudaStatus PlanPath(const Exl3LinearCudaParams& params,
                    const CudaDevice& device,
                    const GemmArgs& args,
                    LinearPath path,
                    Exl3LinearPlan* plan) {
  const Way way = WayOf(path);
  if (!way.clusters) return PlanTasks(params, device, args, way, plan);
  if (PlanClusters(params, device, args, way, plan)) return {};
  return CudaError(-1, "exl3 linear: no cluster of %d segments for %d rows here", args.num_segments,
                   params.rows);
}

// The fastest path that the call has, as measured.
CudaStatus ChoosePath(const Exl3LinearCudaParams& params,
                      const CudaDevice& device,
                      const GemmArgs& args,
                      Exl3LinearPlan* plan) {
  const int rows = params.rows;
  if (rows > kMaxFewRows) return PlanPath(params, device, args, LinearPath::kTasks, plan);
  const int tasks_of_two = (args.num_units + 1) / 2 * args.num_segments;
  // A kernel that rotates x costs about as much as the warps of a block need for one job each.
  constexpr int kConsumerWarps = 8, kResidentRowsBeside = 2;
  const int jobs = (LongestSegment(args) + 3) / 4 * ((rows + 3) / 4);
  const bool beside = args.num_units * args.num_segments > device.num_sms;  // two blocks an SM
  const bool streamed =
      rows > kGroupRows || jobs > kConsumerWarps || (beside && rows > kResidentRowsBeside);
  // Two blocks of outputs a task if every task then has an SM of its own, and the next launch gets
  // ready in its other half. Without the kernel that rotates, blocks of the next launch come to lie
  // two on an SM, unless hardly an SM is without one.
  constexpr int kLongSegment = 16;
  const bool two = beside && args.num_segments <= kMaxClusterSize &&
                   (args.num_units + 1) / 2 <= device.cluster_places[0][args.num_segments] &&
                   LongestSegment(args) >= kLongSegment;
  const bool full = 10 * tasks_of_two >= 9 * device.num_sms;
  if (two && PlanPath(params, device, args,
                      rows > kGroupRows || !full ? LinearPath::kClustersOfTwoStreamed
                                                 : LinearPath::kClustersOfTwo,
                      plan)
                 .ok()) {
    return {};
  }
  if (PlanPath(params, device, args,
               streamed ? LinearPath::kClustersStreamed : LinearPath::kClusters, plan)
          .ok()) {
    return {};
  }
  if (rows > kWarpgroupRows) {
    if (PlanPath(params, device, args, LinearPath::kTasksWarpgroup, plan).ok()) return {};
  } else if (tasks_of_two >= device.num_sms) {
    if (PlanPath(params, device, args, LinearPath::kTasksOfTwo, plan).ok()) return {};
  }
  return PlanPath(params, device, args, LinearPath::kTasks, plan);
}

}  // namespace

int Exl3Segments(int k, int num_units) {
  // Clusters of 1, 2, .. blocks that the reference card holds with one and with two blocks per SM.
  constexpr int kAlone[] = {132, 66, 39, 30, 22, 17, 15, 15};
  constexpr int kBeside[] = {264, 132, 79, 62, 47, 39, 32, 30, 23, 21, 16, 16, 14, 14, 14, 14};
  constexpr double kPlaces = 264;
  // Fitted times in us on it, between 1 and 48 rows: clusters that leave room for the next launch;
  // clusters that do not; tasks without clusters, in rounds. A pair is two tile rows.
  const int pairs = k / kPairK;
  int best = 1;
  double best_us = 1e30;
  for (int s = 1; s <= std::max(1, std::min(pairs / 4, kMaxSegments)); ++s) {
    const double length = static_cast<double>(pairs) / s;
    double us;
    if (s <= static_cast<int>(std::size(kAlone)) && num_units <= kAlone[s - 1]) {
      us = 2.7 + 0.21 * length;
    } else if (s <= static_cast<int>(std::size(kBeside)) && num_units <= kBeside[s - 1]) {
      us = 3.7 + 0.33 * length;
    } else {
      us = 5.0 + std::ceil(num_units * s / kPlaces) * (0.31 * length + 0.9) + 0.03 * s;
    }
    if (us < best_us - 1e-9) {
      best_us = us;
      best = s;
    }
  }
  return best;
}

CudaStatus PlanExl3Linear(const Exl3LinearCudaParams& params,
                          const CudaDevice& device,
                          Exl3LinearPlan* plan) {
  if (CudaStatus status = Validate(params); !status.ok()) return status;
  GemmArgs args{};
  args.kind = GemmKind::kLinear;
  args.rounding_upstream = params.rounding_upstream;
  args.pairs = params.k / kPairK;
  args.rows = params.rows;
  args.x_type = params.x_type;
  args.y_type = params.y_type;
  args.num_matrices = params.num_matrices;
  int units = 0;
  for (int i = 0; i < params.num_matrices; ++i) {
    args.matrices[i] = params.matrices[i];
    args.matrices[i].first_unit = units;
    units += params.matrices[i].num_blocks;
  }
  args.num_units = units;
  args.num_segments = params.num_segments > 0 ? params.num_segments : Exl3Segments(params.k, units);
  args.num_groups = (params.rows + kGroupRows - 1) / kGroupRows;
  // Few tasks: more of them, each of fewer rows, rather than SMs without work.
  const bool few = units * args.num_segments < device.num_sms && args.num_groups <= kMaxTileGroups;
  const int most_groups = few ? kMaxTileGroups / 2 : kMaxTileGroups;
  args.num_tiles = (args.num_groups + most_groups - 1) / most_groups;
  args.tile_groups = (args.num_groups + args.num_tiles - 1) / args.num_tiles;
  args.num_tiles = (args.num_groups + args.tile_groups - 1) / args.tile_groups;
  if (CudaStatus status = FinishArgs(&args); !status.ok()) return status;
  if (params.path == LinearPath::kAuto) return ChoosePath(params, device, args, plan);
  return PlanPath(params, device, args, params.path, plan);
}

size_t Exl3LinearWorkspaceBytes(const Exl3LinearCudaParams& params,
                                const CudaDevice& device,
                                int rows) {
  size_t bytes = 0;
  // Not monotonic in the rows: the paths need different things.
  for (int r :
       {1, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048, 4096, 8192}) {
    Exl3LinearCudaParams p = params;
    p.rows = std::min(r, rows);
    Exl3LinearPlan plan;
    if (PlanExl3Linear(p, device, &plan).ok()) {
      bytes = std::max(bytes, plan.xh_bytes + plan.partial_bytes);
    }
    if (r >= rows) break;
  }
  return kCudaCounterBytes + bytes + bytes / 2;  // between the sampled row counts
}

}  // namespace twinspark
