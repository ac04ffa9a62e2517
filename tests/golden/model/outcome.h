// The result of one comparison, kept until it is decided which run of the model it is taken from.
#pragma once

#include <cstdint>
#include <string>

#include "tests/golden/golden_report.h"

namespace twinspark::golden {

struct Outcome {
  enum class Kind : uint8_t { kBound, kAllowance, kExact, kRecord, kInfo, kSkip };

  std::string label;
  Kind kind = Kind::kRecord;
  Distance distance;
  double value = 0;  // kBound, kAllowance: must not exceed `bound`
  double bound = 0;
  int64_t differing = 0;  // kExact
  int64_t total = 0;
  bool holds = true;  // kRecord
  std::string detail;

  bool ok() const {
    switch (kind) {
      case Kind::kBound:
      case Kind::kAllowance:
        return value <= bound;
      case Kind::kExact:
        return differing == 0 && total > 0;
      case Kind::kRecord:
        return holds;
      default:
        return true;
    }
  }

  // Whether this one is nearer to what is stored than `other`, of the same label.
  bool Better(const Outcome& other) const {
    if (ok() != other.ok()) return ok();
    const bool both_measured = bound > 0 && other.bound > 0;
    return both_measured && value / bound < other.value / other.bound;
  }

  void Report(GoldenReport& report) const {
    switch (kind) {
      case Kind::kBound:
        return report.Compare(label, distance, value, bound);
      case Kind::kAllowance:
        return report.CompareWithAllowance(label, distance, value, bound);
      case Kind::kExact:
        return report.CompareExact(label, differing, total);
      case Kind::kRecord:
        return report.CompareRecord(label, holds, detail);
      case Kind::kInfo:
        return report.Info(label, distance, detail);
      case Kind::kSkip:
        return report.Skip(label, detail, true);
    }
  }
};

}  // namespace twinspark::golden
