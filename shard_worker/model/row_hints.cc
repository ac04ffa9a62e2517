// See row_hints.h. Ids of a sequence: positions [0, committed) are in the caches, the anchor is at
// `committed`.
#include "shard_worker/model/row_hints.h"

#include <algorithm>

#include "shard_worker/model/sequence_state.h"

namespace twinspark {
namespace {

Segment GivenRows(int slot, const SequenceState& sequence, int64_t begin, int64_t max_rows) {
  Segment segment;
  segment.slot = slot;
  segment.sequence = &sequence;
  segment.first_position = begin;
  const int64_t rows = std::clamp<int64_t>(sequence.num_given - begin, 0, max_rows);
  if (rows == 0) return segment;
  segment.ids =
      std::span(sequence.ids).subspan(static_cast<size_t>(begin), static_cast<size_t>(rows));
  return segment;
}

}  // namespace

Segment FirstRows(int slot, const SequenceState& sequence, int64_t max_rows) {
  return GivenRows(slot, sequence, 0, max_rows);
}

std::vector<Segment> RowsAfter(std::span<const Segment> segments, int64_t max_rows) {
  std::vector<Segment> next;
  for (const Segment& segment : segments) {
    const int64_t end = segment.first_position + segment.num_rows();
    const Segment rows = GivenRows(segment.slot, *segment.sequence, end, max_rows);
    if (rows.ids.empty()) continue;
    max_rows -= rows.num_rows();
    next.push_back(rows);
  }
  return next;
}

Segment AnchorRow(int slot, const SequenceState& sequence) {
  Segment segment;
  segment.slot = slot;
  segment.sequence = &sequence;
  segment.first_position = static_cast<int64_t>(sequence.ids.size()) - 1;
  segment.ids = std::span(sequence.ids).last(1);
  return segment;
}

Segment DraftRows(int slot, const SequenceState& sequence) {
  Segment segment;
  segment.slot = slot;
  segment.sequence = &sequence;
  segment.first_position = static_cast<int64_t>(sequence.ids.size());
  segment.ids = sequence.kept_drafts;
  return segment;
}

}  // namespace twinspark
