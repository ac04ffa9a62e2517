// Predicts how long an op takes, from what earlier ones took: for deadlines, for the size of a
// chunk and for sharing time between decoding and bulk prefill. Starts from a cost table measured
// by the workers where there is one, else from a careful guess. Pure; engine thread only.
#pragma once

#include <array>

#include "common/limits.h"

namespace twinspark::gateway {

class StepCost {
 public:
  // Milliseconds. A guess that is too high costs a small first chunk, one too low a long wait.
  static constexpr double kFirstPrefillMsPerRow = 1.0;
  static constexpr double kFirstRoundMs = 20.0;

  double PredictMs(int round_rows, int prefill_rows) const;

  // Most prefill rows whose predicted time is within `ms`; at least one page of them.
  int PrefillRowsWithin(double ms) const;

  // `ms`: what an op of these rows took. Time of a mixed op beyond its predicted round belongs to
  // its prefill rows.
  void Learn(int round_rows, int prefill_rows, double ms);

  // One row of a measured cost table.
  void Preset(bool is_prefill, int rows, double ms);

 private:
  double RoundMs(int rows) const;

  double prefill_ms_per_row_ = kFirstPrefillMsPerRow;
  bool prefill_seen_ = false;
  // By number of rows; 0 = not seen yet.
  std::array<double, limits::kMaxRoundRows + 1> round_ms_{};
};

}  // namespace twinspark::gateway
