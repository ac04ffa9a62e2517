// Shared reporting of the golden_* programs: one line per compared tensor or record, the counts,
// and the exit code. The rules, in one place:
//   - every line: name, max abs, relative L2, bound, then ok, FAIL or info; skipped ones say why;
//   - then "planned P, compared C, skipped K", and as last line "N passed, M failed, K skipped";
//   - info lines count as compared and are neither passed nor failed;
//   - exit 0 only if nothing failed, something passed, every skip is an allowed one and C + K = P;
//     77 if a directory cannot be run that way at all; 1 in every other case.
// Not thread-safe: the main thread of a golden program owns one.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace twinspark::golden {

inline constexpr int kExitPassed = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitCannotRun = 77;

// Distance of two arrays. A size difference or a NaN on one side makes both infinite.
struct Distance {
  double max_abs = 0.0;
  double rel_l2 = 0.0;

  template <class Got, class Want>
  static Distance Of(std::span<const Got> got, std::span<const Want> want) {
    if (got.size() != want.size()) return {HUGE_VAL, HUGE_VAL};
    double max_abs = 0.0;
    double error = 0.0;
    double norm = 0.0;
    for (size_t i = 0; i < got.size(); ++i) {
      const double g = static_cast<double>(got[i]);
      const double w = static_cast<double>(want[i]);
      if (g == w || (std::isnan(g) && std::isnan(w))) {
        if (std::isfinite(w)) norm += w * w;
        continue;
      }
      const double d = std::abs(g - w);
      if (!std::isfinite(d)) return {HUGE_VAL, HUGE_VAL};
      max_abs = std::max(max_abs, d);
      error += d * d;
      norm += w * w;
    }
    return {max_abs, norm > 0.0 ? std::sqrt(error / norm) : (error > 0.0 ? HUGE_VAL : 0.0)};
  }
};

// Whether an argument is --help (or -h); then `usage` and what the programs have in common have
// been printed to stdout, and main returns 0.
bool HelpWasAsked(int argc, const char* const* argv, std::string_view usage);

class GoldenReport {
 public:
  // Adds to P: call it for everything that the directory holds for the selected cases.
  void Plan(int64_t count) { planned_ += count; }

  // `value` (what `bound` bounds: a median, a maximum, ...) is printed with the distance.
  void Compare(std::string_view name, const Distance& distance, double value, double bound);
  // Must be equal in every element.
  void CompareExact(std::string_view name, int64_t differing, int64_t total);
  // A yes-or-no record; `detail` is printed.
  void CompareRecord(std::string_view name, bool ok, std::string_view detail);
  // Counted as compared only.
  void Info(std::string_view name, const Distance& distance, std::string_view detail);

  // As Compare, but of a group of which at most 1 % (at least one) may exceed its bound, none by
  // more than 2x: decided, and the exceeding lines printed, in Finish.
  void CompareWithAllowance(std::string_view name,
                            const Distance& distance,
                            double value,
                            double bound);

  void Skip(std::string_view name, std::string_view reason, bool allowed);

  // Something outside the plan went wrong (a file that cannot be read): the exit code becomes 1.
  void Error(std::string_view text);

  // Prints the counts; returns the exit code. Call once, last.
  int Finish();

 private:
  struct Exceeding {
    std::string name;
    Distance distance;
    double value;
    double bound;
  };
  void Line(std::string_view name,
            const Distance& distance,
            std::string_view bound,
            std::string_view verdict);

  int64_t planned_ = 0;
  int64_t compared_ = 0;
  int64_t passed_ = 0;
  int64_t failed_ = 0;
  int64_t skipped_ = 0;
  int64_t forbidden_skips_ = 0;
  int64_t errors_ = 0;
  int64_t allowance_group_ = 0;
  std::vector<Exceeding> exceeding_;
};

// Says why the directory cannot be run that way; returns 77.
int CannotRun(std::string_view reason);

}  // namespace twinspark::golden
