// Engram rows for every code and scale, and the gate against double: signs, the 1e-6 floor, image
// rows, per-stream norms; rows must not depend on company.
#include "kernels/engram/engram.h"

#include <cmath>
#include <vector>

#include <gtest/gtest.h>

#include "kernels/testing/op_fixture.h"

namespace twinspark {
namespace {

TEST(EngramDequantize, EveryCodeAtEveryScale) {
  OpContext context(2);
  OnEverySimdTarget([&] {
    for (int scale = 0; scale < 256; ++scale) {
      std::vector<uint8_t> codes, scales(8, static_cast<uint8_t>(scale));
      for (int code = 0; code < 256; ++code)
        codes.push_back(static_cast<uint8_t>(code));
      Matrix out(1, 256, DType::kF32), rounded(1, 256, DType::kBf16);
      const ConstTensorView codes_view(
          BasicTensorView<const void*>{codes.data(), DType::kF8E4M3, 1, 256, 256});
      const ConstTensorView scales_view(
          BasicTensorView<const void*>{scales.data(), DType::kF8E8M0, 1, 8, 8});
      EngramDequantizeCpu({.codes = codes_view, .scales = scales_view, .out = out.view()},
                          context.launch());
      EngramDequantizeCpu({.codes = codes_view, .scales = scales_view, .out = rounded.view()},
                          context.launch());
      for (int64_t i = 0; i < 256; ++i) {
        const float code = E4M3ToF32(codes[static_cast<size_t>(i)]);
        if (scale == 255 || std::isnan(code)) {
          EXPECT_TRUE(std::isnan(out.at(0, i)) && std::isnan(rounded.at(0, i))) << i;
          continue;
        }
        const float want = std::ldexp(code, scale - 127);
        EXPECT_EQ(out.at(0, i), want) << i << " at " << scale;
        EXPECT_EQ(rounded.at(0, i), RoundBf16(want)) << i << " at " << scale;
      }
      EXPECT_TRUE(out.PaddingIntact() && rounded.PaddingIntact());
    }
  });
}

TEST(EngramGate, NearDouble) {
  OpContext context(2);
  OnEverySimdTarget([&] {
    RandomTensor random(81);
    for (const DType type : {DType::kF32, DType::kBf16}) {
      for (const int64_t d : {4, 33, 256}) {
        constexpr int64_t kStreams = 4, kRows = 9;
        Matrix s(kRows, kStreams * d, type), kv(kRows, (kStreams + 1) * d, DType::kBf16);
        Matrix weight(kStreams, d, DType::kF32), out(kRows, kStreams * d, type),
            gate(kRows, kStreams, DType::kF32);
        s.Fill(random);
        kv.Fill(random);
        weight.Fill(random);
        for (int64_t c = 0; c < d; ++c)
          kv.set(3, c, 0);  // z = 0: the floor decides
        std::vector<uint8_t> mask(kRows, 0);
        mask[5] = 1;
        std::vector<double> want, want_gate;
        for (int64_t t = 0; t < kRows; ++t) {
          for (int64_t c = 0; c < kStreams; ++c) {
            double ss = 0, kk = 0, z = 0;
            for (int64_t j = 0; j < d; ++j) {
              const double a = s.at(t, c * d + j), k = kv.at(t, c * d + j);
              ss += a * a;
              kk += k * k;
              z += a * static_cast<double>(weight.at(c, j)) * k;
            }
            const double dn = static_cast<double>(d);
            z *= 1 / std::sqrt(ss / dn + 1e-20) / std::sqrt(kk / dn + 1e-20) / std::sqrt(dn);
            double g =
                1 / (1 + std::exp(-std::copysign(std::sqrt(std::max(std::abs(z), 1e-6)), z)));
            if (mask[static_cast<size_t>(t)] != 0) g = 0;
            want_gate.push_back(g);
            for (int64_t j = 0; j < d; ++j) {
              want.push_back(static_cast<double>(s.at(t, c * d + j)) +
                             g * static_cast<double>(kv.at(t, kStreams * d + j)));
            }
          }
        }
        EngramGateParams params{.streams = s.view(),
                                .kv = kv.view(),
                                .weight = weight.view(),
                                .eps = 1e-20f,
                                .image_mask = mask.data(),
                                .out = out.view(),
                                .gate = gate.view()};
        EngramGateCpu(params, context.launch());
        // sqrt near zero magnifies the last bits of z, hence not tighter.
        EXPECT_TRUE(Near(gate, want_gate, 2e-4, 0)) << d;
        EXPECT_TRUE(Near(out, want, 5e-4, 1e-6)) << d;
        Matrix alone(kRows, kStreams * d, type);
        for (int64_t t = 0; t < kRows; ++t) {
          EngramGateCpu({.streams = s.view().Rows(t, 1),
                         .kv = kv.view().Rows(t, 1),
                         .weight = weight.view(),
                         .eps = 1e-20f,
                         .image_mask = mask.data() + t,
                         .out = alone.view().Rows(t, 1)},
                        context.launch());
        }
        EXPECT_TRUE(SameBits(alone, out));
        params.out = s.view();
        EngramGateCpu(params, context.launch());
        EXPECT_TRUE(SameBits(s, out)) << "in place";
      }
    }
  });
}

}  // namespace
}  // namespace twinspark
