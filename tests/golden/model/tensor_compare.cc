// Metrics and margins (tensor_compare.h).
#include "tests/golden/model/tensor_compare.h"

#include <algorithm>
#include <cmath>
#include <iterator>
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

// Whether a token of [begin, end) is affected, or has an affected one in its window.
bool Reaches(const AffectedTokens& affected, int64_t begin, int64_t end, int64_t window) {
  const auto first = affected.lower_bound(begin - window + 1);
  return first != affected.end() && *first < end;
}

// Whether an entry of only one of the two lists stands for such tokens.
bool DiffersInAffected(const std::set<int>& a,
                       const std::set<int>& b,
                       int64_t tokens_per_entry,
                       int64_t window,
                       const AffectedTokens& affected) {
  std::vector<int> difference;
  std::set_symmetric_difference(a.begin(), a.end(), b.begin(), b.end(),
                                std::back_inserter(difference));
  return std::any_of(difference.begin(), difference.end(), [&](int entry) {
    return Reaches(affected, entry * tokens_per_entry, (entry + 1) * tokens_per_entry, window);
  });
}

Outcome Record(const std::string& label, bool holds, std::string detail) {
  Outcome outcome;
  outcome.label = label;
  outcome.holds = holds;
  outcome.detail = std::move(detail);
  return outcome;
}

Outcome Info(const std::string& label, const Distance& distance, std::string detail) {
  Outcome outcome;
  outcome.label = label;
  outcome.kind = Outcome::Kind::kInfo;
  outcome.distance = distance;
  outcome.detail = std::move(detail);
  return outcome;
}

}  // namespace

Outcome CompareRows(const std::string& label,
                    const ExpectedTensor& tensor,
                    const Values& got,
                    const Values& want,
                    const CompareContext& context) {
  if (got.rows != want.rows || got.cols != want.cols)
    return Record(label, false,
                  absl::StrFormat("shape [%d, %d], expected [%d, %d]", got.rows, got.cols,
                                  want.rows, want.cols));
  // End to end in bf16 another candidate list masks other scores; which ones is compared as L.cand.
  const bool skips_masked =
      !context.is_f32 && !context.alone && absl::EndsWith(tensor.name, ".score");
  Outcome outcome;
  outcome.label = label;
  std::vector<double> rows;
  for (int64_t r = 0; r < want.rows; ++r) {
    std::vector<float> a(got.Row(r), got.Row(r) + got.cols);
    std::vector<float> b(want.Row(r), want.Row(r) + want.cols);
    for (size_t i = 0; skips_masked && i < a.size(); ++i)
      if (!std::isfinite(a[i]) || !std::isfinite(b[i])) a[i] = b[i] = 0;
    const Distance row = Distance::Of(std::span<const float>(a), std::span<const float>(b));
    outcome.distance.max_abs = std::max(outcome.distance.max_abs, row.max_abs);
    rows.push_back(row.rel_l2);
  }
  if (rows.empty()) return Record(label, true, "no rows");
  std::sort(rows.begin(), rows.end());
  const size_t half = rows.size() / 2;
  const double median = rows.size() % 2 == 1 ? rows[half] : 0.5 * (rows[half - 1] + rows[half]);
  outcome.distance.rel_l2 = rows.back();
  if (context.drafts_differ) return Info(label, outcome.distance, "drafts differ");
  outcome.value = median;
  outcome.bound = context.alone ? tensor.isolated_bound : tensor.median_bound;
  outcome.kind =
      context.is_f32 || context.alone ? Outcome::Kind::kBound : Outcome::Kind::kAllowance;
  if (context.is_f32 && tensor.max_bound > 0 && !(rows.back() <= tensor.max_bound)) {
    outcome.value = rows.back();
    outcome.bound = tensor.max_bound;
  }
  return outcome;
}

Outcome CompareSets(const std::string& label,
                    const ExpectedTensor& tensor,
                    const Values& got,
                    const Values& want,
                    const Values& gaps,
                    const Values& scores,
                    int64_t first_token,
                    int64_t tokens_per_entry,
                    const CompareContext& context,
                    AffectedTokens& affected) {
  const bool is_route = absl::EndsWith(tensor.name, "route.ids");
  const double factor =
      (is_route ? kRouteGap : kSelectionGap) * (context.alone ? kAloneFactor : 1.0);
  if (got.rows != want.rows || static_cast<int64_t>(gaps.data.size()) < want.rows)
    return Record(label, false,
                  absl::StrFormat("%d rows, expected %d with %d gaps", got.rows, want.rows,
                                  gaps.data.size()));
  const bool spares_affected = !context.is_f32 && !context.alone;
  int64_t differing = 0;
  int64_t reliable = 0;
  int64_t reliable_differing = 0;
  double widest = 0;
  std::vector<int64_t> newly_affected;
  for (int64_t r = 0; r < want.rows; ++r) {
    const double gap = gaps.data[static_cast<size_t>(r)];
    double scale = 1.0;
    if (!is_route) scale = r < scores.rows ? StandardDeviation(scores.Row(r), scores.cols) : 1.0;
    const bool is_reliable = (!std::isfinite(gap) || gap > factor * scale) &&
                             !(spares_affected && Reaches(affected, first_token + r,
                                                          first_token + r + 1, context.window));
    const bool same = RowSet(got, r) == RowSet(want, r);
    reliable += is_reliable ? 1 : 0;
    if (same) continue;
    ++differing;
    widest = std::max(widest, std::isfinite(gap) ? gap / std::max(scale, 1e-30) : HUGE_VAL);
    const bool excused =
        spares_affected && DiffersInAffected(RowSet(got, r), RowSet(want, r), tokens_per_entry,
                                             context.window, affected);
    reliable_differing += is_reliable && !excused ? 1 : 0;
    newly_affected.push_back(first_token + r);
  }
  affected.insert(newly_affected.begin(), newly_affected.end());
  const std::string detail =
      absl::StrFormat("%d of %d rows differ, %d of %d reliable ones, widest margin %.3g", differing,
                      want.rows, reliable_differing, reliable, widest);
  if (context.is_f32 || context.alone || context.decisions_count)
    return Record(label, reliable_differing == 0, detail);
  return Info(label, {}, detail);
}

Outcome CompareChoices(const std::string& label,
                       const std::vector<int32_t>& got,
                       const std::vector<int32_t>& want,
                       const std::vector<double>& margins,
                       const Values& logits,
                       bool chain,
                       const CompareContext& context) {
  if (got.size() != want.size() || margins.size() != want.size())
    return Record(label, false, absl::StrFormat("%d ids, expected %d", got.size(), want.size()));
  int64_t differing = 0;
  int64_t reliable_differing = 0;
  double widest = 0;
  bool broken = false;
  for (size_t i = 0; i < want.size(); ++i) {
    if (got[i] == want[i]) continue;
    ++differing;
    if (chain && broken) continue;
    broken = true;
    const double scale = static_cast<int64_t>(i) < logits.rows
                             ? StandardDeviation(logits.Row(static_cast<int64_t>(i)), logits.cols)
                             : 1.0;
    widest = std::max(widest, margins[i]);
    const double limit = context.is_f32 ? kArgmaxGapF32 : kArgmaxGapBf16;
    reliable_differing += margins[i] > limit * scale ? 1 : 0;
  }
  const std::string detail = absl::StrFormat("%d of %d differ, %d at reliable margins, widest %.3g",
                                             differing, want.size(), reliable_differing, widest);
  if (context.is_f32 || context.decisions_count)
    return Record(label, reliable_differing == 0, detail);
  return Info(label, {}, detail);
}

Values InOrderOf(const Values& weights, const Values& ids, const Values& wanted_ids) {
  Values ordered = weights;
  if (ids.rows != weights.rows || ids.cols != weights.cols || wanted_ids.rows != weights.rows ||
      wanted_ids.cols != weights.cols)
    return ordered;
  for (int64_t r = 0; r < weights.rows; ++r) {
    if (RowSet(ids, r) != RowSet(wanted_ids, r)) continue;
    for (int64_t i = 0; i < weights.cols; ++i)
      for (int64_t j = 0; j < weights.cols; ++j)
        if (ids.Row(r)[j] == wanted_ids.Row(r)[i])
          ordered.data[static_cast<size_t>(r * weights.cols + i)] = weights.Row(r)[j];
  }
  return ordered;
}

}  // namespace twinspark::golden
