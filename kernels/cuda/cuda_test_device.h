// For tests that compare a CUDA op with its CPU sibling: the module and GPU of the process, device
// buffers, and a main that skips loudly where there is no GPU. The module is the file named by
// TWINSPARK_CUDA_MODULE, else libtwinspark_cuda.so beside the program.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "common/check.h"
#include "kernels/cuda/cuda_loader.h"

namespace twinspark {

inline constexpr int kSkipExitCode = 77;  // ctest: SKIP_RETURN_CODE

inline void CheckCuda(const CudaStatus& status) {
  CHECK(status.ok()) << status.text << " (code " << status.code << ")";
}

class TestGpu {
 public:
  // Null with the reason in `reason` if there is no module or no GPU that it can use.
  static const TestGpu* Open(const std::string& program, std::string* reason) {
    static TestGpu gpu;
    const char* path = std::getenv("TWINSPARK_CUDA_MODULE");
    const auto module = OpenCudaModule(path != nullptr ? path
                                                       : program.substr(0, program.rfind('/') + 1) +
                                                             "libtwinspark_cuda.so");
    if (!module.ok()) {
      *reason = std::string(module.status().message());
      return nullptr;
    }
    gpu.module_ = *module;
    const CudaStatus status = gpu.module_->query_device(0, &gpu.device_);
    if (!status.ok()) {
      *reason = status.text;
      return nullptr;
    }
    opened_ = &gpu;
    return opened_;
  }
  static const TestGpu& Get() { return *opened_; }

  const CudaModule& module() const { return *module_; }
  const CudaDevice& device() const { return device_; }

 private:
  inline static const TestGpu* opened_ = nullptr;
  const CudaModule* module_ = nullptr;
  CudaDevice device_;
};

// Owned device memory for `count` elements, zeroed or copied from the host.
template <class T>
class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t count) : count_(count) {
    void* memory = nullptr;
    CheckCuda(TestGpu::Get().module().allocate(count * sizeof(T), &memory));
    data_ = static_cast<T*>(memory);
  }
  explicit DeviceBuffer(const std::vector<T>& host) : DeviceBuffer(host.size()) {
    CheckCuda(TestGpu::Get().module().copy(data_, host.data(), count_ * sizeof(T)));
  }
  DeviceBuffer(DeviceBuffer&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), count_(other.count_) {}
  DeviceBuffer& operator=(DeviceBuffer&&) = delete;
  ~DeviceBuffer() {
    if (data_ != nullptr) CheckCuda(TestGpu::Get().module().release(data_));
  }

  T* get() const { return data_; }
  size_t size() const { return count_; }
  std::vector<T> ToHost() const {
    std::vector<T> host(count_);
    CheckCuda(TestGpu::Get().module().copy(host.data(), data_, count_ * sizeof(T)));
    return host;
  }

 private:
  T* data_ = nullptr;
  size_t count_;
};

// Scratch of one op.
class DeviceWorkspace {
 public:
  explicit DeviceWorkspace(size_t bytes) : memory_(bytes) {}
  CudaWorkspace view() const { return {memory_.get(), memory_.size()}; }

 private:
  DeviceBuffer<uint8_t> memory_;
};

// Runs the tests, or says why not and returns kSkipExitCode.
inline int RunCudaTests(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  std::string reason;
  if (TestGpu::Open(argv[0], &reason) == nullptr) {
    std::printf("SKIPPED: nothing was compared, no GPU: %s\n", reason.c_str());
    return kSkipExitCode;
  }
  std::printf("GPU with %d SMs, compute capability %d\n", TestGpu::Get().device().num_sms,
              TestGpu::Get().device().compute_capability);
  return RUN_ALL_TESTS();
}

}  // namespace twinspark
