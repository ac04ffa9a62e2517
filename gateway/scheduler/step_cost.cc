#include "gateway/scheduler/step_cost.h"

#include <algorithm>

#include "common/check.h"

namespace twinspark::gateway {
namespace {

constexpr double kNewWeight = 0.2;   // of one measurement in a running mean
constexpr int kMinRowsToLearn = 16;  // fewer prefill rows say more about the fixed cost

double Blend(double old_value, double new_value) {
  return old_value + kNewWeight * (new_value - old_value);
}

}  // namespace

double StepCost::RoundMs(int rows) const {
  if (rows == 0) return 0;
  CHECK(rows > 0 && rows <= limits::kMaxRoundRows) << rows << " rows in a round";
  // The nearest size seen, scaled up (never down: a smaller round still reads the weights).
  for (int below = rows; below > 0; --below) {
    const double ms = round_ms_[static_cast<size_t>(below)];
    if (ms > 0) return ms * rows / below;
  }
  for (int above = rows + 1; above <= limits::kMaxRoundRows; ++above) {
    const double ms = round_ms_[static_cast<size_t>(above)];
    if (ms > 0) return ms;
  }
  return kFirstRoundMs;
}

double StepCost::PredictMs(int round_rows, int prefill_rows) const {
  return RoundMs(round_rows) + prefill_rows * prefill_ms_per_row_;
}

int StepCost::PrefillRowsWithin(double ms) const {
  const double rows = std::min(ms / prefill_ms_per_row_, double{limits::kMaxChunkRows});
  const int whole_pages = static_cast<int>(rows) / limits::kPageTokens * limits::kPageTokens;
  return std::max(whole_pages, limits::kPageTokens);
}

void StepCost::Learn(int round_rows, int prefill_rows, double ms) {
  if (ms <= 0) return;
  if (prefill_rows == 0 && round_rows > 0) {
    double& seen = round_ms_[static_cast<size_t>(round_rows)];
    seen = seen > 0 ? Blend(seen, ms) : ms;
  } else if (prefill_rows >= kMinRowsToLearn) {
    const double prefill_ms = std::max(ms - RoundMs(round_rows), 0.05 * ms);
    const double per_row = prefill_ms / prefill_rows;
    prefill_ms_per_row_ = prefill_seen_ ? Blend(prefill_ms_per_row_, per_row) : per_row;
    prefill_seen_ = true;
  }
}

void StepCost::Preset(bool is_prefill, int rows, double ms) {
  if (rows <= 0 || ms <= 0) return;
  if (is_prefill) {
    prefill_ms_per_row_ = ms / rows;
    prefill_seen_ = true;
  } else if (rows <= limits::kMaxRoundRows) {
    round_ms_[static_cast<size_t>(rows)] = ms;
  }
}

}  // namespace twinspark::gateway
