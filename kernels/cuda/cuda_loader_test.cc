// The loader must turn every way of not being a module into a sentence. What the module computes is
// checked on a GPU by device_check.
#include "kernels/cuda/cuda_loader.h"

#include <cstdlib>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace twinspark {
namespace {

using ::testing::HasSubstr;

TEST(CudaLoaderTest, MissingFileNamesThePath) {
  const auto module = OpenCudaModule("/nowhere/libtwinspark_cuda.so");
  ASSERT_FALSE(module.ok());
  EXPECT_EQ(module.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(module.status().message()), HasSubstr("/nowhere/libtwinspark_cuda.so"));
}

TEST(CudaLoaderTest, OtherLibraryIsRefused) {
  const auto module = OpenCudaModule("libm.so.6");
  ASSERT_FALSE(module.ok());
  EXPECT_THAT(std::string(module.status().message()), HasSubstr("not a CUDA module"));
}

TEST(CudaLoaderTest, ModuleAnswersWithoutGpu) {
  const char* path = std::getenv("TWINSPARK_CUDA_MODULE");
  if (path == nullptr) GTEST_SKIP() << "TWINSPARK_CUDA_MODULE is not set: no module to open";
  const auto module = OpenCudaModule(path);
  ASSERT_TRUE(module.ok()) << module.status();
  EXPECT_EQ((*module)->version, kCudaInterfaceVersion);
  CudaDevice device;
  const CudaStatus status = (*module)->query_device(0, &device);
  EXPECT_TRUE(status.ok() ? device.num_sms > 0 : status.text[0] != '\0');
}

}  // namespace
}  // namespace twinspark
