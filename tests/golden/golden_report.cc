// See golden_report.h.
#include "tests/golden/golden_report.h"

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_format.h"

namespace twinspark::golden {
namespace {

std::string ValueAndBound(double value, double bound) {
  return absl::StrFormat("%.3g <= %.3g", value, bound);
}

}  // namespace

bool HelpWasAsked(int argc, const char* const* argv, std::string_view usage) {
  for (int i = 1; i < argc; ++i) {
    const std::string_view flag = argv[i];
    if (flag != "--help" && flag != "-h") continue;
    std::printf("%.*s", static_cast<int>(usage.size()), usage.data());
    std::printf(
        "Prints a line per comparison, then the counts. Exit codes: 0 passed, 1 failed or bad\n"
        "argument, 77 the directory cannot be run that way (tests/README.md).\n");
    return true;
  }
  return false;
}

void GoldenReport::Line(std::string_view name,
                        const Distance& distance,
                        std::string_view bound,
                        std::string_view verdict) {
  std::printf("%-44.*s max_abs %-10.3g rel_l2 %-10.3g bound %-24.*s %.*s\n",
              static_cast<int>(name.size()), name.data(), distance.max_abs, distance.rel_l2,
              static_cast<int>(bound.size()), bound.data(), static_cast<int>(verdict.size()),
              verdict.data());
}

void GoldenReport::Compare(std::string_view name,
                           const Distance& distance,
                           double value,
                           double bound) {
  const bool ok = value <= bound;  // false for NaN
  ++compared_;
  ++(ok ? passed_ : failed_);
  Line(name, distance, ValueAndBound(value, bound), ok ? "ok" : "FAIL");
}

void GoldenReport::CompareExact(std::string_view name, int64_t differing, int64_t total) {
  const bool ok = differing == 0 && total > 0;
  ++compared_;
  ++(ok ? passed_ : failed_);
  const double share =
      total > 0 ? static_cast<double>(differing) / static_cast<double>(total) : HUGE_VAL;
  std::printf("%-44.*s differing %ld of %ld (%.3g) bound %-22s %s\n", static_cast<int>(name.size()),
              name.data(), static_cast<long>(differing), static_cast<long>(total), share, "exact",
              ok ? "ok" : "FAIL");
}

void GoldenReport::CompareRecord(std::string_view name, bool ok, std::string_view detail) {
  ++compared_;
  ++(ok ? passed_ : failed_);
  std::printf("%-44.*s %.*s %s\n", static_cast<int>(name.size()), name.data(),
              static_cast<int>(detail.size()), detail.data(), ok ? "ok" : "FAIL");
}

void GoldenReport::Info(std::string_view name, const Distance& distance, std::string_view detail) {
  ++compared_;
  Line(name, distance, detail, "info");
}

void GoldenReport::CompareWithAllowance(std::string_view name,
                                        const Distance& distance,
                                        double value,
                                        double bound) {
  ++compared_;
  ++allowance_group_;
  if (value <= bound) {
    ++passed_;
    Line(name, distance, ValueAndBound(value, bound), "ok");
  } else {
    exceeding_.push_back({std::string(name), distance, value, bound});
  }
}

void GoldenReport::Skip(std::string_view name, std::string_view reason, bool allowed) {
  ++skipped_;
  if (!allowed) ++forbidden_skips_;
  std::printf("%-44.*s skipped: %.*s%s\n", static_cast<int>(name.size()), name.data(),
              static_cast<int>(reason.size()), reason.data(), allowed ? "" : " (not allowed)");
}

void GoldenReport::Error(std::string_view text) {
  ++errors_;
  std::printf("error: %.*s\n", static_cast<int>(text.size()), text.data());
}

int GoldenReport::Finish() {
  const int64_t allowance = std::max<int64_t>(1, allowance_group_ / 100);
  const bool too_many = static_cast<int64_t>(exceeding_.size()) > allowance;
  for (const Exceeding& e : exceeding_) {
    const bool ok = !too_many && e.value <= 2.0 * e.bound;
    ++(ok ? passed_ : failed_);
    Line(e.name, e.distance, ValueAndBound(e.value, e.bound),
         ok ? "ok (over, within the allowance)" : "FAIL");
  }
  if (!exceeding_.empty()) {
    std::printf("over their bound: %ld of %ld, allowed %ld, none above twice its bound\n",
                static_cast<long>(exceeding_.size()), static_cast<long>(allowance_group_),
                static_cast<long>(allowance));
  }
  const bool counts_agree = compared_ + skipped_ == planned_;
  std::printf("planned %ld, compared %ld, skipped %ld%s\n", static_cast<long>(planned_),
              static_cast<long>(compared_), static_cast<long>(skipped_),
              counts_agree ? "" : " (compared + skipped is not planned)");
  std::printf("%ld passed, %ld failed, %ld skipped\n", static_cast<long>(passed_),
              static_cast<long>(failed_), static_cast<long>(skipped_));
  std::fflush(stdout);
  const bool passed = failed_ == 0 && passed_ > 0 && forbidden_skips_ == 0 && errors_ == 0;
  return passed && counts_agree ? kExitPassed : kExitFailed;
}

int CannotRun(std::string_view reason) {
  std::printf("cannot run: %.*s\n", static_cast<int>(reason.size()), reason.data());
  return kExitCannotRun;
}

}  // namespace twinspark::golden
