// The comparison rules of model vectors: metrics, margins and tolerances (vectors' README and the
// model vectors' section 5).
#pragma once

#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "tests/golden/model/golden_case.h"
#include "tests/golden/model/outcome.h"

namespace twinspark::golden {

// What a tensor is compared under.
struct CompareContext {
  bool is_f32 = false;
  bool alone = false;            // a block alone, from stored inputs
  bool decisions_count = false;  // else decisions are printed only
  bool drafts_differ = false;    // conf and dspark.logits are then information
  int64_t window = 1;            // sliding_window: how far a token reaches through the rings
};

// Tokens for which a decision (selection, candidates, experts) has already come out differently in
// this run, where its margin allowed it. A flipped row or expert changes everything after it in
// that token and in those whose window holds it (section 5): end to end in bf16 their later
// decisions, and later choices between rows that were made from them, are no longer reliable.
using AffectedTokens = std::set<int64_t>;

// row_rel_l2: the median over the rows, and in f32 also the worst row.
Outcome CompareRows(const std::string& label,
                    const ExpectedTensor& tensor,
                    const Values& got,
                    const Values& want,
                    const CompareContext& context);

// set_if_margin: the same set wherever `gaps` is wide. `scores` (may be empty) gives the rows'
// standard deviations for sel and cand; row r is token first_token + r; entry e of a list stands
// for tokens [e, e + 1) * tokens_per_entry (0: for none).
Outcome CompareSets(const std::string& label,
                    const ExpectedTensor& tensor,
                    const Values& got,
                    const Values& want,
                    const Values& gaps,
                    const Values& scores,
                    int64_t first_token,
                    int64_t tokens_per_entry,
                    const CompareContext& context,
                    AffectedTokens& affected);

// Ids against stored ones where the margin is wide; `logits` gives the rows' standard deviations.
// With `chain`, rows after the first difference do not count.
Outcome CompareChoices(const std::string& label,
                       const std::vector<int32_t>& got,
                       const std::vector<int32_t>& want,
                       const std::vector<double>& margins,
                       const Values& logits,
                       bool chain,
                       const CompareContext& context);

// Routing weights in the order of the stored ids, wherever both rows chose the same experts: nearly
// equal experts may come in either order.
Values InOrderOf(const Values& weights, const Values& ids, const Values& wanted_ids);

}  // namespace twinspark::golden
