// Which Engram rows the next steps will probably ask for, as segments of their sequences: what is
// passed to RowSource::Hint. Pure functions of the sequences' state; the segments borrow its ids
// and hold until it changes. A wrong guess costs a read, never a result. Spec: engram.md 4.5.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shard_worker/model/step_tables.h"

namespace twinspark {

// The beginning of a prompt that has just been queued: at most `max_rows` rows.
Segment FirstRows(int slot, const SequenceState& sequence, int64_t max_rows);

// Behind every prompt part among `segments`: the part that follows, while the prompt lasts; all
// together at most `max_rows` rows.
std::vector<Segment> RowsAfter(std::span<const Segment> segments, int64_t max_rows);

// The token that was just sampled: first row of the next round. Its rows depend on nothing else.
Segment AnchorRow(int slot, const SequenceState& sequence);

// The drafts kept for the next round, behind the anchor.
Segment DraftRows(int slot, const SequenceState& sequence);

}  // namespace twinspark
