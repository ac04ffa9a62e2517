// See machine_rates.h. Each loop keeps enough independent chains to fill the units.
#include "kernels/testing/machine_rates.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <vector>

#include "kernels/tensor_view.h"

#ifndef TWINSPARK_KERNELS_TESTING_EMPTY_OP_
#define TWINSPARK_KERNELS_TESTING_EMPTY_OP_
namespace twinspark {
namespace {
struct EmptyParams {
  ConstTensorView x, weight;
  TensorView out;
};
}  // namespace
}  // namespace twinspark
#endif  // TWINSPARK_KERNELS_TESTING_EMPTY_OP_

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/testing/machine_rates_cpu.cc"
#include "hwy/foreach_target.h"
// Highway needs its headers after foreach_target.h.
#include "hwy/highway.h"
#include "kernels/parallel_rows.h"
#include "kernels/row_norm-inl.h"

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

int NumLanes() {
  return static_cast<int>(hn::Lanes(DF()));
}

// 6 chains of shifts.
double ShiftLoop(int64_t rounds, float* sink) {
  const hn::ScalableTag<uint32_t> d;
  const auto m = hn::Set(d, 0x12345u);
  auto a = hn::Set(d, static_cast<uint32_t>(sink[0])), b = hn::Add(a, m), c = hn::Add(b, m);
  auto e = hn::Add(c, m), f = hn::Add(e, m), g = hn::Add(f, m);
  const auto twice = [](auto v) HWY_ATTR { return hn::ShiftRight<1>(hn::ShiftLeft<3>(v)); };
  for (int64_t r = 0; r < rounds; ++r) {
    a = twice(a);
    b = twice(b);
    c = twice(c);
    e = twice(e);
    f = twice(f);
    g = twice(g);
  }
  const auto sum = hn::Add(hn::Add(a, hn::Add(b, c)), hn::Add(e, hn::Add(f, g)));
  sink[0] = static_cast<float>(hn::GetLane(sum) & 0xff);
  return 12.0 * static_cast<double>(rounds) * static_cast<double>(hn::Lanes(d));
}

// 6 chains of divisions.
double DivideLoop(int64_t rounds, float* sink) {
  const DF d;
  const VF m = hn::Set(d, 1.5f);
  VF a = hn::Set(d, sink[0] + 1.0f), b = hn::Add(a, m), c = hn::Add(b, m);
  VF e = hn::Add(c, m), f = hn::Add(e, m), g = hn::Add(f, m);
  for (int64_t r = 0; r < rounds; ++r) {
    a = hn::Div(m, a);
    b = hn::Div(m, b);
    c = hn::Div(m, c);
    e = hn::Div(m, e);
    f = hn::Div(m, f);
    g = hn::Div(m, g);
  }
  const VF sum = hn::Add(hn::Add(a, hn::Add(b, c)), hn::Add(e, hn::Add(f, g)));
  sink[0] = std::min(hn::GetLane(sum), 1.0f);
  return 6.0 * static_cast<double>(rounds) * static_cast<double>(hn::Lanes(d));
}

// What a norm does between its two passes, every time with the result of the last; returns times.
double NormChainLoop(int64_t rounds, float* sink) {
  const DF d;
  VF v = hn::Set(d, sink[0]);
  for (int64_t r = 0; r < rounds; ++r)
    v = hn::Set(d, InverseRoot(ReduceLanes(d, v), 256, 1e-6f));
  sink[0] = hn::GetLane(v);
  return static_cast<double>(rounds);
}

// The end of an op that finds nothing to do.
void EmptyRows(const EmptyParams& p, int64_t begin, int64_t end) {
  WithFloatType(p.x.dtype, [&](auto* in_type) {
    WithFloatType(p.out.dtype, [&](auto* out_type) {
      using In = std::remove_pointer_t<decltype(in_type)>;
      using Out = std::remove_pointer_t<decltype(out_type)>;
      for (int64_t t = begin; t < end; ++t) {
        const In* in = p.x.Row<In>(t);
        Out* out = p.out.Row<Out>(t);
        asm volatile("" : : "r"(in), "r"(out) : "memory");
      }
    });
  });
}

// Writes a buffer of whole vectors; returns bytes.
double WriteLoop(float* HWY_RESTRICT data, size_t count, float* sink) {
  const DF d;
  const size_t lanes = hn::Lanes(d);
  const VF value = hn::Set(d, sink[0]);
  size_t i = 0;
  for (; i + 4 * lanes <= count; i += 4 * lanes) {
    hn::StoreU(value, d, data + i);
    hn::StoreU(value, d, data + i + lanes);
    hn::StoreU(value, d, data + i + 2 * lanes);
    hn::StoreU(value, d, data + i + 3 * lanes);
  }
  asm volatile("" : : "r"(data) : "memory");
  return static_cast<double>(i * sizeof(float));
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
HWY_EXPORT(ShiftLoop);
HWY_EXPORT(DivideLoop);
HWY_EXPORT(NormChainLoop);
HWY_EXPORT(EmptyRows);
HWY_EXPORT(ReadLoop);
HWY_EXPORT(WriteLoop);
HWY_EXPORT(NumLanes);

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

void EmptyCpu(const EmptyParams& params, const Launch& launch) {
  CHECK_EQ(params.x.rows, params.out.rows);
  CHECK_EQ(params.x.cols, params.out.cols);
  CHECK_EQ(params.weight.cols, params.x.cols);
  CHECK(params.weight.dtype == DType::kF32);
  const int64_t grain = RowGrain(0.2 * static_cast<double>(params.x.cols));
  ParallelRows(launch, params.x.rows, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(EmptyRows)(params, begin, end);
  });
}

// Calls of an op that does nothing with one row.
double CallLoop() {
  constexpr int kCalls = 20000;
  ThreadPool pool(1);
  const Launch launch{.pool = &pool};
  Bf16 x[16] = {}, out[16] = {};
  float weight[16] = {};
  const EmptyParams params = {
      .x = MakeView(x, 1, 16), .weight = MakeView(weight, 1, 16), .out = MakeView(out, 1, 16)};
  void (*volatile op)(const EmptyParams&, const Launch&) = EmptyCpu;  // as through the table
  for (int i = 0; i < kCalls; ++i)
    op(params, launch);
  return kCalls;
}

}  // namespace

OpWork operator+(const OpWork& a, const OpWork& b) {
  return {a.fma + b.fma,   a.simple + b.simple,   a.shift + b.shift,    a.divide + b.divide,
          a.read + b.read, a.written + b.written, a.chain_s + b.chain_s};
}

double BoundSeconds(const MachineRates& rates, const OpWork& work, int num_threads) {
  const double all = work.fma + work.simple + work.shift + work.divide;
  const double longest =
      std::max({all / rates.simple_lanes_per_s, work.fma / rates.fma_lanes_per_s,
                work.shift / rates.shift_lanes_per_s, work.divide / rates.divide_lanes_per_s,
                work.read / rates.read_bytes_per_s, work.written / rates.write_bytes_per_s});
  return rates.call_s + longest / num_threads + work.chain_s;
}

MachineRates MeasureMachineRates(size_t working_set_bytes) {
  constexpr int64_t kRounds = 300000;
  constexpr size_t kMinFloats = 1024;
  float sink = 1.0f;
  MachineRates rates;
  rates.fma_lanes_per_s =
      BestRate(7, [&] { return HWY_DYNAMIC_DISPATCH(FmaLoop)(kRounds, &sink); });
  rates.simple_lanes_per_s =
      BestRate(7, [&] { return HWY_DYNAMIC_DISPATCH(SimpleLoop)(kRounds, &sink); });
  rates.shift_lanes_per_s =
      BestRate(7, [&] { return HWY_DYNAMIC_DISPATCH(ShiftLoop)(kRounds, &sink); });
  rates.divide_lanes_per_s =
      BestRate(7, [&] { return HWY_DYNAMIC_DISPATCH(DivideLoop)(kRounds / 10, &sink); });
  rates.norm_chain_s =
      1 / BestRate(7, [&] { return HWY_DYNAMIC_DISPATCH(NormChainLoop)(kRounds / 20, &sink); });
  rates.call_s = 1 / BestRate(7, CallLoop);
  rates.lanes = HWY_DYNAMIC_DISPATCH(NumLanes)();
  std::vector<float> data(std::max(kMinFloats, working_set_bytes / sizeof(float)), 1.0f);
  const int repeats = static_cast<int>(std::max<size_t>(1, (4u << 20) / (data.size() * 4)));
  rates.read_bytes_per_s = BestRate(7, [&] {
    double bytes = 0.0;
    for (int r = 0; r < repeats; ++r)
      bytes += HWY_DYNAMIC_DISPATCH(ReadLoop)(data.data(), data.size(), &sink);
    return bytes;
  });
  rates.write_bytes_per_s = BestRate(7, [&] {
    double bytes = 0.0;
    for (int r = 0; r < repeats; ++r)
      bytes += HWY_DYNAMIC_DISPATCH(WriteLoop)(data.data(), data.size(), &sink);
    return bytes;
  });
  return rates;
}

}  // namespace twinspark
#endif  // HWY_ONCE
