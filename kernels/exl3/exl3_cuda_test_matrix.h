// A stored matrix in device memory, prepared for the CUDA ops. For tests.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/cuda/cuda_test_device.h"
#include "kernels/exl3/exl3_gemm_cuda.h"
#include "kernels/exl3/exl3_stored_matrix.h"

namespace twinspark {

class DeviceExl3 {
 public:
  explicit DeviceExl3(const StoredMatrix& m)
      : k_(static_cast<int32_t>(m.k)),
        n_(static_cast<int32_t>(m.n)),
        trellis_(m.trellis.size() * sizeof(uint16_t)),
        suh_(m.suh),
        svh_(m.svh) {
    const DeviceBuffer<uint16_t> stored(m.trellis);
    CheckCuda(TestGpu::Get().module().exl3_prepare(stored.get(), n_, 0, k_, n_, m.bits,
                                                   trellis_.get(), nullptr));
    uint8_t last = 0;  // `stored` must live until the kernel is done
    CheckCuda(TestGpu::Get().module().copy(&last, trellis_.get(), 1));
  }

  exl3::GemmMatrix Bind(const void* x, int64_t x_stride, void* y, int64_t y_stride) const {
    exl3::GemmMatrix m{};
    m.trellis = trellis_.get();
    m.suh = suh_.get();
    m.svh = svh_.get();
    m.x = x;
    m.y = y;
    m.x_stride = x_stride;
    m.y_stride = y_stride;
    m.x_cols = k_;
    m.y_cols = n_;
    m.num_blocks = n_ / exl3::kBlockN;
    return m;
  }
  const uint8_t* trellis() const { return trellis_.get(); }
  const void* suh() const { return suh_.get(); }
  const void* svh() const { return svh_.get(); }

 private:
  int32_t k_, n_;
  DeviceBuffer<uint8_t> trellis_;
  DeviceBuffer<F16> suh_, svh_;
};

}  // namespace twinspark
