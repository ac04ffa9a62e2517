// The comparison rules of model vectors: metrics, margins and tolerances (vectors' README and the
// model vectors' section 5), on top of GoldenReport.
#pragma once

#include <string>

#include "tests/golden/golden_report.h"
#include "tests/golden/model/golden_case.h"

namespace twinspark::golden {

// What a tensor is compared under.
struct CompareContext {
  bool is_f32 = false;
  bool alone = false;            // a block alone, from stored inputs
  bool decisions_count = false;  // else decisions are printed only
  bool drafts_differ = false;    // conf and dspark.logits are then information
};

// row_rel_l2: the median over the rows, and in f32 also the worst row.
void CompareRows(const std::string& label,
                 const ExpectedTensor& tensor,
                 const Values& got,
                 const Values& want,
                 const CompareContext& context,
                 GoldenReport& report);

// set_if_margin: the same set wherever `gaps` is wide. `scores` (may be empty) gives the rows'
// standard deviations for sel and cand.
void CompareSets(const std::string& label,
                 const ExpectedTensor& tensor,
                 const Values& got,
                 const Values& want,
                 const Values& gaps,
                 const Values& scores,
                 const CompareContext& context,
                 GoldenReport& report);

// Ids against stored ones where the margin is wide; `logits` gives the rows' standard deviations.
// With `chain`, rows after the first difference do not count. Returns the number that differ.
int64_t CompareChoices(const std::string& label,
                       const std::vector<int32_t>& got,
                       const std::vector<int32_t>& want,
                       const std::vector<double>& margins,
                       const Values& logits,
                       bool chain,
                       const CompareContext& context,
                       GoldenReport& report);

}  // namespace twinspark::golden
