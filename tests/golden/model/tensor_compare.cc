// Metrics and margins (tensor_compare.h).
#include "tests/golden/model/tensor_compare.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace twinspark::golden {
namespace {

constexpr double kRouteGap = 0.02;      // of biased scores
constexpr double kSelectionGap = 0.12;  // standard deviations of the row's finite scores
constexpr double kAloneFactor = 0.1;    // a block alone needs a tenth of that
constexpr double kArgmaxGapF32 = 0.1;   // standard deviations of the row's logits
constexpr double kArgmaxGapBf16 = 0.5;

double StandardDeviation(const float* values, int64_t count) {
  double sum = 0;
  double squares = 0;
  int64_t n = 0;
  for (int64_t i = 0; i < count; ++i) {
    if (!std::isfinite(values[i])) continue;
    sum += values[i];
    squares += static_cast<double>(values[i]) * values[i];
    ++n;
  }
  if (n == 0) return 0;
  const double mean = sum / static_cast<double>(n);
  return std::sqrt(std::max(0.0, squares / static_cast<double>(n) - mean * mean));
}

std::set<int> RowSet(const Values& values, int64_t row) {
  std::set<int> out;
  for (int64_t i = 0; i < values.cols; ++i)
    if (values.Row(row)[i] >= 0) out.insert(static_cast<int>(values.Row(row)[i]));
  return out;
}

}  // namespace

void CompareRows(const std::string& label,
                 const ExpectedTensor& tensor,
                 const Values& got,
                 const Values& want,
                 const CompareContext& context,
                 GoldenReport& report) {
  const double bound = context.alone ? tensor.isolated_bound : tensor.median_bound;
  if (got.rows != want.rows || got.cols != want.cols) {
    report.CompareRecord(label, false,
                         absl::StrFormat("shape [%d, %d], expected [%d, %d]", got.rows, got.cols,
                                         want.rows, want.cols));
    return;
  }
  Distance overall;
  std::vector<double> rows;
  for (int64_t r = 0; r < want.rows; ++r) {
    const size_t cols = static_cast<size_t>(want.cols);
    const Distance row = Distance::Of(std::span(got.Row(r), cols), std::span(want.Row(r), cols));
    overall.max_abs = std::max(overall.max_abs, row.max_abs);
    rows.push_back(row.rel_l2);
  }
  if (rows.empty()) {
    report.CompareRecord(label, true, "no rows");
    return;
  }
  std::sort(rows.begin(), rows.end());
  const size_t half = rows.size() / 2;
  const double median = rows.size() % 2 == 1 ? rows[half] : 0.5 * (rows[half - 1] + rows[half]);
  overall.rel_l2 = rows.back();
  if (context.drafts_differ) {
    report.Info(label, overall, "drafts differ");
    return;
  }
  const bool worst_decides =
      context.is_f32 && tensor.max_bound > 0 && !(rows.back() <= tensor.max_bound);
  if (worst_decides) {
    report.Compare(label, overall, rows.back(), tensor.max_bound);
  } else if (context.is_f32 || context.alone) {
    report.Compare(label, overall, median, bound);
  } else {
    report.CompareWithAllowance(label, overall, median, bound);
  }
}

void CompareSets(const std::string& label,
                 const ExpectedTensor& tensor,
                 const Values& got,
                 const Values& want,
                 const Values& gaps,
                 const Values& scores,
                 const CompareContext& context,
                 GoldenReport& report) {
  const bool is_route = absl::EndsWith(tensor.name, "route.ids");
  const double factor =
      (is_route ? kRouteGap : kSelectionGap) * (context.alone ? kAloneFactor : 1.0);
  if (got.rows != want.rows || static_cast<int64_t>(gaps.data.size()) < want.rows) {
    report.CompareRecord(label, false,
                         absl::StrFormat("%d rows, expected %d with %d gaps", got.rows, want.rows,
                                         gaps.data.size()));
    return;
  }
  int64_t differing = 0;
  int64_t reliable = 0;
  int64_t reliable_differing = 0;
  double worst_margin = 0;
  for (int64_t r = 0; r < want.rows; ++r) {
    const double gap = gaps.data[static_cast<size_t>(r)];
    double scale = 1.0;
    if (!is_route) scale = r < scores.rows ? StandardDeviation(scores.Row(r), scores.cols) : 1.0;
    const bool is_reliable = !std::isfinite(gap) || gap > factor * scale;
    const bool same = RowSet(got, r) == RowSet(want, r);
    reliable += is_reliable ? 1 : 0;
    if (same) continue;
    ++differing;
    worst_margin =
        std::max(worst_margin, std::isfinite(gap) ? gap / std::max(scale, 1e-30) : HUGE_VAL);
    reliable_differing += is_reliable ? 1 : 0;
  }
  const std::string detail =
      absl::StrFormat("%d of %d rows differ, %d of %d reliable ones, widest margin %.3g", differing,
                      want.rows, reliable_differing, reliable, worst_margin);
  if (context.is_f32 || context.alone || context.decisions_count) {
    report.CompareRecord(label, reliable_differing == 0, detail);
  } else {
    report.Info(label, {}, detail);
  }
}

int64_t CompareChoices(const std::string& label,
                       const std::vector<int32_t>& got,
                       const std::vector<int32_t>& want,
                       const std::vector<double>& margins,
                       const Values& logits,
                       bool chain,
                       const CompareContext& context,
                       GoldenReport& report) {
  if (got.size() != want.size() || margins.size() != want.size()) {
    report.CompareRecord(label, false,
                         absl::StrFormat("%d ids, expected %d", got.size(), want.size()));
    return static_cast<int64_t>(want.size());
  }
  int64_t differing = 0;
  int64_t reliable_differing = 0;
  double worst_margin = 0;
  bool broken = false;
  for (size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i]) continue;
    ++differing;
    if (chain && broken) continue;
    broken = true;
    const double scale = static_cast<int64_t>(i) < logits.rows
                             ? StandardDeviation(logits.Row(static_cast<int64_t>(i)), logits.cols)
                             : 1.0;
    worst_margin = std::max(worst_margin, margins[i]);
    const double limit = context.is_f32 ? kArgmaxGapF32 : kArgmaxGapBf16;
    reliable_differing += margins[i] > limit * scale ? 1 : 0;
  }
  const std::string detail =
      absl::StrFormat("%d of %d differ, %d at reliable margins, widest %.3g", differing,
                      want.size(), reliable_differing, worst_margin);
  if (context.is_f32 || context.decisions_count) {
    report.CompareRecord(label, reliable_differing == 0, detail);
  } else {
    report.Info(label, {}, detail);
  }
  return differing;
}

}  // namespace twinspark::golden
