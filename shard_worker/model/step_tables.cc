// Index arithmetic of a step (step_tables.h).
#include "shard_worker/model/step_tables.h"

#include <algorithm>

namespace twinspark {

StepTables::StepTables(const ModelConfig& config, int64_t max_rows) : c_(config) {
  const size_t rows = static_cast<size_t>(max_rows);
  ids.reserve(rows);
  positions.reserve(rows);
  image_mask.reserve(rows);
  attention.reserve(rows);
  ring_row.reserve(rows);
  carry_row.reserve(rows);
  draft_row.reserve(rows);
  for (int ratio = 1; ratio <= 2; ++ratio) {
    index[ratio].reserve(rows);
    groups[ratio].ratio = ratio;
    groups[ratio].positions.reserve(rows);
    groups[ratio].sources.reserve(rows);
    groups[ratio].store_row.reserve(rows);
  }
}

void StepTables::Build(std::span<Segment> segments, const KvCache& cache) {
  num_rows = 0;
  num_logits_rows = 0;
  has_images = false;
  logits_ranges.clear();
  for (auto* list : {&positions, &ring_row, &carry_row, &draft_row})
    list->clear();
  ids.clear();
  image_mask.clear();
  attention.clear();
  for (int ratio = 1; ratio <= 2; ++ratio) {
    index[ratio].clear();
    GroupTable& table = groups[ratio];
    table.num_groups = 0;
    for (auto* list : {&table.positions, &table.sources, &table.store_row})
      list->clear();
  }

  const int64_t window = c_.sliding_window;
  for (Segment& s : segments) {
    s.row_begin = num_rows;
    const int64_t a = s.first_position;
    const int64_t end = a + s.num_rows();
    const int32_t* pages = s.sequence->pages.data();
    // Drafting starts after the given ids at the earliest, so only their last rows can be context.
    const int64_t draft_begin =
        std::max<int64_t>(end - cache.ring_slots(), s.sequence->num_given - window);
    for (int64_t p = a; p < end; ++p) {
      ids.push_back(s.ids[static_cast<size_t>(p - a)]);
      positions.push_back(p);
      const bool is_image = s.sequence->IsImage(p);
      image_mask.push_back(is_image ? 1 : 0);
      has_images = has_images || is_image;

      const int64_t first_key = std::max<int64_t>(0, p - window + 1);
      AttentionRow row;
      row.ring_first_row = cache.RingRow(s.slot, 0);
      row.ring_begin = std::min(first_key, a);
      row.ring_end = a;
      row.step_begin = s.row_begin + std::max<int64_t>(0, first_key - a);
      row.step_end = s.row_begin + (p - a) + 1;
      row.pages = pages;
      attention.push_back(row);
      for (int ratio = 1; ratio <= 2; ++ratio)
        index[ratio].push_back({pages, (p + 1) / ratio});

      ring_row.push_back(p >= end - cache.ring_slots() ? cache.RingRow(s.slot, p) : -1);
      carry_row.push_back(p >= end - KvCache::kCarrySlots ? KvCache::CarryRow(s.slot, p) : -1);
      draft_row.push_back(p >= draft_begin ? cache.RingRow(s.slot, p) : -1);
    }
    for (int ratio = 1; ratio <= 2; ++ratio)
      AddGroups(s, groups[ratio]);
    num_rows += s.num_rows();
    if (s.logits_rows > 0) logits_ranges.emplace_back(num_rows - s.logits_rows, s.logits_rows);
    num_logits_rows += s.logits_rows;
  }
}

void StepTables::AddGroups(const Segment& s, GroupTable& table) {
  const int64_t r = table.ratio;
  const int64_t a = s.first_position;
  const int64_t end = a + s.num_rows();
  const int64_t rows_per_page = KvCache::RowsPerPage(table.ratio);
  // Group g completes with token (g + 1) * r - 1.
  for (int64_t g = (a + r) / r - 1; (g + 1) * r <= end; ++g) {
    table.positions.push_back(g * r);
    for (int64_t p = g * r; p < (g + 1) * r; ++p)
      table.sources.push_back(p >= a ? s.row_begin + p - a : -1 - KvCache::CarryRow(s.slot, p));
    const int64_t page = s.sequence->pages[static_cast<size_t>(g / rows_per_page)];
    table.store_row.push_back(page * rows_per_page + g % rows_per_page);
    ++table.num_groups;
  }
}

void StepTables::BuildDraft(std::span<const Segment> segments, const KvCache& cache) {
  num_rows = 0;
  has_images = false;
  ids.clear();
  positions.clear();
  image_mask.clear();
  attention.clear();
  for (const Segment& s : segments) {
    const int64_t first_position = s.first_position;
    for (int64_t j = 0; j < s.num_rows(); ++j) {
      ids.push_back(s.ids[static_cast<size_t>(j)]);
      positions.push_back(first_position + j);
      image_mask.push_back(0);
      AttentionRow row;
      row.ring_first_row = cache.RingRow(s.slot, 0);
      row.ring_begin = std::max<int64_t>(0, first_position - c_.sliding_window);
      row.ring_end = first_position;
      row.step_begin = num_rows;
      row.step_end = num_rows + s.num_rows();
      attention.push_back(row);
    }
    num_rows += s.num_rows();
  }
}

}  // namespace twinspark
