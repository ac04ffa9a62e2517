// How many drafts each sequence verifies in a round. Results never depend on it (keyed noise), only
// speed does; so this is the one place that adaptive depth will change. Pure.
#pragma once

#include <span>
#include <vector>

#include "gateway/scheduler/sequence.h"

namespace twinspark::gateway {

// Most drafts `sequence` may verify in its next round when the ops in flight add `growth` tokens to
// its ids: what the worker keeps, its own maximum, and what remains of its output (a round emits up
// to k + 1 tokens).
int MaxDraftsOfRound(const Sequence& sequence, int growth);

// Whether drafts made at the end of a round or prefill that leaves at most `remaining` tokens to
// emit can be of use.
bool DraftsWanted(const Sequence& sequence, int remaining);

inline constexpr int kNotThisRound = -1;

// Row budget: sum of 1 + k over the round <= max_rows. First every k is lowered to one common cap;
// rows left over go to the first sequences that want more; when even k = 0 is too much, the later
// sequences wait (kNotThisRound): the caller rotates the order. Returns k per sequence.
std::vector<int> AllocateDrafts(std::span<const int> wanted, int max_rows);

}  // namespace twinspark::gateway
