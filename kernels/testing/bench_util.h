// What every x_bench shares: its main with the flags (--smoke: tiny and once; --json: one object
// per line; --threads N; --target NAME pins a SIMD target), a timer that takes the median of
// repeated runs, and one output format:
//   shape, time, rates named by the bench, share of the bound (0..1).
// With one thread the time is the thread's CPU time, so that a busy machine does not spoil the
// figure; with several it is wall time, and the machine should be otherwise idle.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <time.h>

#include "absl/status/status.h"

#include "kernels/simd_target.h"

namespace twinspark {

struct BenchFlags {
  bool smoke = false;
  bool json = false;
  int threads = 1;
  std::string target;  // SIMD target to pin, empty = best
};

// Exits with 2 on an unknown flag.
inline BenchFlags ParseBenchFlags(int argc, char** argv) {
  BenchFlags flags;
  for (int i = 1; i < argc; ++i) {
    const std::string_view arg = argv[i];
    if (arg == "--smoke") {
      flags.smoke = true;
    } else if (arg == "--json") {
      flags.json = true;
    } else if (arg == "--threads" && i + 1 < argc) {
      flags.threads = std::max(1, std::atoi(argv[++i]));
    } else if (arg == "--target" && i + 1 < argc) {
      flags.target = argv[++i];
    } else {
      std::fprintf(stderr, "usage: %s [--smoke] [--json] [--threads N] [--target NAME]\n", argv[0]);
      std::exit(2);
    }
  }
  return flags;
}

// The main of a bench: flags and SIMD target, then run(flags), which does something tiny when
// flags.smoke. Returns the exit status: 2 for a target that this machine or build lacks.
template <class Run>
int BenchMain(int argc, char** argv, const Run& run) {
  const BenchFlags flags = ParseBenchFlags(argc, argv);
  if (const absl::Status pinned = PinSimdTarget(flags.target); !pinned.ok()) {
    std::fprintf(stderr, "%s\n", pinned.ToString().c_str());
    return 2;
  }
  if (!flags.smoke) {
    std::fprintf(stderr, "%s, %d thread(s)\n", SimdTarget().c_str(), flags.threads);
  }
  run(flags);
  return 0;
}

inline double BenchSeconds(const BenchFlags& flags) {
  timespec now = {};
  clock_gettime(flags.threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC, &now);
  return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Median seconds of one call of fn, over at least 0.2 s (smoke: one call). Calls too short for the
// clock, which takes some 0.2 us itself, are timed many at a time.
template <class Fn>
double MedianSeconds(const BenchFlags& flags, Fn&& fn) {
  constexpr double kMinTotalSeconds = 0.2;
  constexpr double kMinRunSeconds = 20e-6;
  constexpr size_t kMinRuns = 5;
  constexpr size_t kMaxRuns = 20000;
  const auto seconds_of = [&](int64_t calls) {
    const double start = BenchSeconds(flags);
    for (int64_t i = 0; i < calls; ++i)
      fn();
    return BenchSeconds(flags) - start;
  };
  if (flags.smoke) return seconds_of(1);
  fn();               // warm-up
  int64_t calls = 1;  // doubled, as a single short call would be measured as one of the clock
  while (seconds_of(calls) < kMinRunSeconds)
    calls *= 2;
  std::vector<double> runs;
  for (double total = 0.0;
       runs.size() < kMaxRuns && (total < kMinTotalSeconds || runs.size() < kMinRuns);) {
    const double seconds = seconds_of(calls);
    total += seconds;
    runs.push_back(seconds / static_cast<double>(calls));
  }
  std::nth_element(runs.begin(), runs.begin() + static_cast<int64_t>(runs.size() / 2), runs.end());
  return runs[runs.size() / 2];
}

// One line of a bench. `rates` are name and value, e.g. {"Gweights/s", 4.1}, {"GB/s", 9.8}.
inline void PrintBenchLine(const BenchFlags& flags,
                           const std::string& shape,
                           double seconds,
                           const std::vector<std::pair<std::string, double>>& rates,
                           double share_of_bound) {
  if (flags.json) {
    std::printf("{\"shape\":\"%s\",\"us\":%.3f", shape.c_str(), seconds * 1e6);
    for (const auto& [name, value] : rates)
      std::printf(",\"%s\":%.4f", name.c_str(), value);
    std::printf(",\"share_of_bound\":%.3f}\n", share_of_bound);
  } else {
    std::printf("%-44s %10.1f us", shape.c_str(), seconds * 1e6);
    for (const auto& [name, value] : rates)
      std::printf("  %8.2f %s", value, name.c_str());
    std::printf("  %5.1f %% of bound\n", share_of_bound * 100.0);
  }
  std::fflush(stdout);
}

}  // namespace twinspark
