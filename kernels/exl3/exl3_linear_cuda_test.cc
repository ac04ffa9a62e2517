// The CUDA linear against its CPU sibling on the same random matrices and inputs: decoded weights
// bit for bit; outputs with the same rounding of xh (the sums differ in order only); and both
// against a product in double without any rounding, whose bound is the error of the reference
// implementation's GEMM with f16 outputs. Needs a GPU; skips loudly without.
#include "kernels/exl3/exl3_linear_cuda.h"

#include <algorithm>
#include <cmath>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/cuda/cuda_test_device.h"
#include "kernels/exl3/exl3_cuda_test_matrix.h"
#include "kernels/exl3/exl3_linear.h"
#include "kernels/testing/compare.h"
#include "kernels/testing/op_fixture.h"

namespace twinspark {
namespace {

// rms error over rms output. Same xh bits, f32 sums in two orders: measured at most 2e-6. Without
// any rounding, the f16 xh alone is 3e-4; the reference's GEMM with f16 outputs has 4.4e-4 and
// more.
constexpr double kSameRounding = 3e-6;
constexpr double kNoRounding = 4.4e-4;

constexpr Exl3Codebook kCodebooks[] = {Exl3Codebook::k3Inst, Exl3Codebook::kMcg,
                                       Exl3Codebook::kMul1};

int Threads() {
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

TEST(Exl3ReconstructCuda, SameBitsAsTheCpuDecode) {
  RandomTensor random(71);
  for (const Exl3Codebook codebook : kCodebooks) {
    for (int bits = 1; bits <= 8; ++bits) {
      const int64_t k = 128 * (1 + random.Below(6)), n = 128 * (1 + random.Below(6));
      SCOPED_TRACE(testing::Message()
                   << Exl3CodebookName(codebook) << " K " << bits << ", " << k << " x " << n);
      const StoredMatrix stored(random.Bits(), k, n, bits, codebook);
      std::vector<F16> want(static_cast<size_t>(k * n));
      Exl3Decode(stored.Prepare(), want);
      const DeviceExl3 matrix(stored);
      const DeviceBuffer<F16> got(want.size());
      Exl3ReconstructCudaParams params;
      params.k = static_cast<int32_t>(k);
      params.n = static_cast<int32_t>(n);
      params.bits = bits;
      params.codebook = static_cast<int32_t>(codebook);
      params.matrix = matrix.Bind(nullptr, 0, nullptr, 0);
      params.out = got.get();
      params.out_stride = n;
      CheckCuda(TestGpu::Get().module().exl3_reconstruct(params, nullptr));
      EXPECT_TRUE(BitEqual<F16>(got.ToHost(), want));
    }
  }
}

// x of one case: the same numbers for both ops in x's type, and in double.
struct Input {
  Input(RandomTensor& random, int64_t rows, int64_t cols, DType dtype)
      : x(random.NormalF32(rows * cols)), bf16(x.size()), type(dtype) {
    for (size_t i = 0; i < x.size(); ++i) {
      bf16[i] = ToBf16(x[i]);
      if (type == DType::kBf16) x[i] = ToF32(bf16[i]);
    }
  }
  std::vector<float> x;
  std::vector<Bf16> bf16;
  DType type;
};

// One row in double from the decoded matrix, nothing rounded.
std::vector<double> ExactRow(const StoredMatrix& m, const std::vector<F16>& wq, const float* x) {
  std::vector<double> xh(static_cast<size_t>(m.k)), y(static_cast<size_t>(m.n));
  for (size_t i = 0; i < xh.size(); ++i)
    xh[i] = static_cast<double>(x[i]) * static_cast<double>(ToF32(m.suh[i]));
  NaiveHadamard(xh);
  for (size_t i = 0; i < xh.size(); ++i) {
    for (size_t j = 0; j < y.size(); ++j)
      y[j] += xh[i] * static_cast<double>(ToF32(wq[i * y.size() + j]));
  }
  NaiveHadamard(y);
  for (size_t j = 0; j < y.size(); ++j)
    y[j] *= static_cast<double>(ToF32(m.svh[j]));
  return y;
}

void CompareLinear(RandomTensor& random,
                   int64_t k,
                   int64_t n,
                   int bits,
                   Exl3Codebook codebook,
                   DType type,
                   std::vector<int64_t> row_counts) {
  const int64_t most = *std::max_element(row_counts.begin(), row_counts.end());
  SCOPED_TRACE(testing::Message() << Exl3CodebookName(codebook) << " K " << bits << ", " << k
                                  << " x " << n << ", up to " << most << " rows");
  const StoredMatrix stored(random.Bits(), k, n, bits, codebook);
  const Exl3Weights weights = stored.Prepare();
  const Input input(random, most, k, type);
  OpContext context(Threads(), size_t{512} << 20);
  std::vector<float> want(static_cast<size_t>(most * n));
  Exl3LinearCpu({&weights, MakeView(input.x.data(), most, k), MakeView(want.data(), most, n),
                 Exl3Rounding::kF16},
                context.launch());

  const DeviceExl3 matrix(stored);
  const DeviceBuffer<float> x(input.x);
  const DeviceBuffer<Bf16> x_bf16(input.bf16);
  const DeviceBuffer<float> y(want.size());
  const CudaModule& module = TestGpu::Get().module();
  Exl3LinearCudaParams params;
  params.k = static_cast<int32_t>(k);
  params.bits = bits;
  params.codebook = static_cast<int32_t>(codebook);
  params.x_type = type == DType::kBf16 ? exl3::kTypeBf16 : exl3::kTypeF32;
  params.y_type = exl3::kTypeF32;
  const void* device_x = type == DType::kBf16 ? static_cast<const void*>(x_bf16.get()) : x.get();
  params.matrices[0] = matrix.Bind(device_x, k, y.get(), n);
  params.rows = static_cast<int32_t>(most);
  const DeviceWorkspace workspace(
      module.exl3_linear_workspace(params, TestGpu::Get().device(), static_cast<int>(most)));
  for (const int64_t rows : row_counts) {
    SCOPED_TRACE(testing::Message() << rows << " rows");
    params.rows = static_cast<int32_t>(rows);
    CheckCuda(module.exl3_linear(params, TestGpu::Get().device(), workspace.view(), nullptr));
    const std::vector<float> got = y.ToHost();
    const size_t count = static_cast<size_t>(rows * n);
    EXPECT_LT(RelativeL2<float>(std::span(got).first(count), std::span(want).first(count)),
              kSameRounding);
  }
  std::vector<F16> wq(static_cast<size_t>(k * n));
  Exl3Decode(weights, wq);
  const std::vector<float> got = y.ToHost();  // of the last row count
  for (const int64_t row : {int64_t{0}, row_counts.back() - 1}) {
    const size_t at = static_cast<size_t>(row * n), width = static_cast<size_t>(n);
    const std::vector<double> exact =
        ExactRow(stored, wq, input.x.data() + static_cast<size_t>(row * k));
    EXPECT_LT(RelativeL2<double>(std::span(got).subspan(at, width), exact), kNoRounding);
    EXPECT_LT(RelativeL2<double>(std::span(want).subspan(at, width), exact), kNoRounding);
  }
}

TEST(Exl3LinearCuda, EveryRowCountUpTo64) {
  RandomTensor random(72);
  std::vector<int64_t> rows;
  for (int64_t m = 1; m <= 64; ++m)
    rows.push_back(m);
  for (int bits = 1; bits <= 8; ++bits) {
    const int64_t k = 128 * (1 + random.Below(10)), n = 128 * (1 + random.Below(5));
    CompareLinear(random, k, n, bits, Exl3Codebook::kMul1,
                  bits % 2 == 0 ? DType::kF32 : DType::kBf16, rows);
  }
  CompareLinear(random, 512, 256, 3, Exl3Codebook::k3Inst, DType::kBf16, rows);
  CompareLinear(random, 384, 256, 4, Exl3Codebook::kMcg, DType::kBf16, rows);
}

TEST(Exl3LinearCuda, ManyRowsAndModelShapes) {
  RandomTensor random(73);
  CompareLinear(random, 5120, 1280, 5, Exl3Codebook::kMul1, DType::kBf16, {1, 6, 100, 255});
  CompareLinear(random, 1152, 5120, 3, Exl3Codebook::kMul1, DType::kBf16, {1, 2, 48, 255});
  for (const int bits : {2, 3, 5, 6}) {
    const int64_t k = 128 * (1 + random.Below(8)), n = 128 * (1 + random.Below(4));
    CompareLinear(random, k, n, bits, Exl3Codebook::kMul1, DType::kBf16, {100, 255, 1000, 4096});
  }
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::RunCudaTests(argc, argv);
}
