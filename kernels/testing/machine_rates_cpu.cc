// See machine_rates.h. Each loop keeps enough independent chains to fill the units.
#include "kernels/testing/machine_rates.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/testing/machine_rates_cpu.cc"
#include "hwy/foreach_target.h"
// Highway needs its headers after foreach_target.h.
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// 10 chains of multiply-adds (4 cycles of latency times two a cycle are 8); returns lane
// operations. Every chain begins elsewhere: equal ones would become one, whose latency is then
// measured.
double FmaLoop(int64_t rounds, float* sink) {
  const hn::ScalableTag<float> d;
  const auto m = hn::Set(d, 0.999f);
  auto a = hn::Set(d, sink[0]), b = hn::Add(a, m), c = hn::Add(b, m), e = hn::Add(c, m);
  auto f = hn::Add(e, m), g = hn::Add(f, m), h = hn::Add(g, m), i = hn::Add(h, m);
  auto j = hn::Add(i, m), k = hn::Add(j, m);
  for (int64_t r = 0; r < rounds; ++r) {
    a = hn::MulAdd(a, m, m);
    b = hn::MulAdd(b, m, m);
    c = hn::MulAdd(c, m, m);
    e = hn::MulAdd(e, m, m);
    f = hn::MulAdd(f, m, m);
    g = hn::MulAdd(g, m, m);
    h = hn::MulAdd(h, m, m);
    i = hn::MulAdd(i, m, m);
    j = hn::MulAdd(j, m, m);
    k = hn::MulAdd(k, m, m);
  }
  const auto sum = hn::Add(hn::Add(hn::Add(a, b), hn::Add(c, e)),
                           hn::Add(hn::Add(f, g), hn::Add(hn::Add(h, i), hn::Add(j, k))));
  sink[0] = hn::GetLane(sum);
  return 10.0 * static_cast<double>(rounds) * static_cast<double>(hn::Lanes(d));
}

// 6 chains of addition and exclusive or on integers, which no instruction does together.
double SimpleLoop(int64_t rounds, float* sink) {
  const hn::ScalableTag<uint32_t> d;
  const auto m = hn::Set(d, 0x12345u);
  auto a = hn::Set(d, static_cast<uint32_t>(sink[0])), b = hn::Add(a, m), c = hn::Add(b, m);
  auto e = hn::Add(c, m), f = hn::Add(e, m), g = hn::Add(f, m);
  for (int64_t r = 0; r < rounds; ++r) {
    a = hn::Xor(hn::Add(a, m), m);
    b = hn::Xor(hn::Add(b, m), m);
    c = hn::Xor(hn::Add(c, m), m);
    e = hn::Xor(hn::Add(e, m), m);
    f = hn::Xor(hn::Add(f, m), m);
    g = hn::Xor(hn::Add(g, m), m);
  }
  const auto sum = hn::Add(hn::Add(a, hn::Add(b, c)), hn::Add(e, hn::Add(f, g)));
  sink[0] = static_cast<float>(hn::GetLane(sum) & 0xff);
  return 12.0 * static_cast<double>(rounds) * static_cast<double>(hn::Lanes(d));
}

// Reads a buffer of whole vectors; returns bytes. (Joined by or, which takes one cycle: chains of
// additions would be slower than the first-level cache.)
double ReadLoop(const float* HWY_RESTRICT data, size_t count, float* sink) {
  const hn::ScalableTag<uint32_t> d;
  const size_t lanes = hn::Lanes(d);
  const auto* HWY_RESTRICT words = reinterpret_cast<const uint32_t*>(data);
  auto a = hn::Zero(d), b = a, c = a, e = a;
  size_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    a = hn::Or(a, hn::LoadU(d, words + i));
    b = hn::Or(b, hn::LoadU(d, words + i + lanes));
    c = hn::Or(c, hn::LoadU(d, words + i + 2 * lanes));
    e = hn::Or(e, hn::LoadU(d, words + i + 3 * lanes));
  }
  sink[0] = static_cast<float>(hn::GetLane(hn::Or(hn::Or(a, b), hn::Or(c, e))) & 0xff);
  return static_cast<double>(i * sizeof(float));
}

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
namespace {

HWY_EXPORT(FmaLoop);
HWY_EXPORT(SimpleLoop);
HWY_EXPORT(ReadLoop);

// Best rate of several runs: amount per second.
template <class Fn>
double BestRate(int runs, Fn&& fn) {
  using Clock = std::chrono::steady_clock;
  double best = 0.0;
  for (int i = 0; i < runs; ++i) {
    const auto start = Clock::now();
    const double amount = fn();
    const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    best = std::max(best, amount / std::max(seconds, 1e-9));
  }
  return best;
}

}  // namespace

MachineRates MeasureMachineRates(size_t working_set_bytes) {
  constexpr int64_t kRounds = 300000;
  constexpr size_t kMinFloats = 1024;
  float sink = 1.0f;
  MachineRates rates;
  rates.fma_lanes_per_s =
      BestRate(7, [&] { return HWY_DYNAMIC_DISPATCH(FmaLoop)(kRounds, &sink); });
  rates.simple_lanes_per_s =
      BestRate(7, [&] { return HWY_DYNAMIC_DISPATCH(SimpleLoop)(kRounds, &sink); });
  const std::vector<float> data(std::max(kMinFloats, working_set_bytes / sizeof(float)), 1.0f);
  const int repeats = static_cast<int>(std::max<size_t>(1, (4u << 20) / (data.size() * 4)));
  rates.read_bytes_per_s = BestRate(7, [&] {
    double bytes = 0.0;
    for (int r = 0; r < repeats; ++r)
      bytes += HWY_DYNAMIC_DISPATCH(ReadLoop)(data.data(), data.size(), &sink);
    return bytes;
  });
  return rates;
}

}  // namespace twinspark
#endif  // HWY_ONCE
