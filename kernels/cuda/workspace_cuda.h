// Scratch memory of the CUDA ops and the error text they return. One workspace per stream: two ops
// on the same workspace must be ordered by their stream. Plain structs, no CUDA headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace twinspark {

// Device memory. The first kCudaCounterBytes must be zero when an op is first given the workspace;
// every op leaves them zero again, so a captured graph can be replayed without clearing anything.
inline constexpr size_t kCudaCounterBytes = 256 * 1024;

struct CudaWorkspace {
  void* data = nullptr;
  size_t bytes = 0;
};

inline constexpr int kMaxClusterSize = 16;

// What the plans need to know of a device; filled once from its properties.
struct CudaDevice {
  int num_sms = 0;
  size_t shared_bytes_per_sm = 0;
  size_t shared_bytes_per_block = 0;  // with opt-in
  int compute_capability = 0;         // 10 major + minor: 90 has warpgroup instructions
  // Thread-block clusters of a size that are resident at once, with one and with two blocks per SM
  // (Exl3ClusterPlaces). 0: that size is not used.
  int cluster_places[2][kMaxClusterSize + 1] = {};
};

// code 0: launched. Negative: refused before any launch. Positive: a cudaError_t.
struct CudaStatus {
  int code = 0;
  char text[200] = {};
  bool ok() const { return code == 0; }
};

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
CudaStatus
CudaError(int code, const char* format, ...);

}  // namespace twinspark
