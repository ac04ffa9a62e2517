// Index arithmetic of steps against the rules written out for one row at a time: which keys a row
// sees, which groups complete and from where, where rows are stored, over random cuts of sequences.
#include "shard_worker/model/step_tables.h"

#include <algorithm>
#include <set>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "common/testing/seeded_rng.h"

namespace twinspark {
namespace {

ModelConfig SmallConfig() {
  ModelConfig c;
  c.num_layers = 3;
  c.head_dim = 32;
  c.index_head_dim = 32;
  c.sliding_window = 8;
  c.kv_source_layer_ids = {1, 2};
  c.layers.resize(3);
  c.layers[1].ratio = 2;
  c.layers[2].ratio = 1;
  return c;
}

ModelOptions TwoSlots() {
  ModelOptions options;
  options.limits.num_slots = 2;
  options.limits.num_pages = 16;
  return options;
}

SequenceState Sequence(int64_t length, int32_t first_page) {
  SequenceState s;
  s.is_open = true;
  s.ids.resize(static_cast<size_t>(length));
  s.num_given = length;
  for (int64_t page = 0; page * 64 < length + 64; ++page)
    s.pages.push_back(first_page + 7 - static_cast<int32_t>(page));  // descending on purpose
  return s;
}

class StepTablesTest : public ::testing::Test {
 protected:
  const ModelConfig config_ = SmallConfig();
  KvCache cache_{config_, TwoSlots(), false};
  StepTables tables_{config_, 1000};
  SequenceState sequences_[2] = {Sequence(300, 0), Sequence(300, 8)};

  Segment Part(int slot, int64_t begin, int64_t end) {
    Segment s;
    s.slot = slot;
    s.sequence = &sequences_[slot];
    s.first_position = begin;
    s.ids = std::span(sequences_[slot].ids)
                .subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    s.logits_rows = 1;
    return s;
  }
};

TEST_F(StepTablesTest, EveryRowSeesItsWindowOnce) {
  SeededRng rng(TestSeed(3));
  for (int round = 0; round < 200; ++round) {
    const int64_t a = rng.Int(0, 100);
    const int64_t b = rng.Int(0, 100);
    Segment segments[] = {Part(0, a, a + rng.Int(1, 40)), Part(1, b, b + rng.Int(1, 40))};
    tables_.Build(segments, cache_);
    for (const Segment& s : segments)
      for (int64_t i = 0; i < s.num_rows(); ++i) {
        const int64_t p = s.first_position + i;
        const AttentionRow& row = tables_.attention[static_cast<size_t>(s.row_begin + i)];
        std::vector<int64_t> seen;
        for (int64_t q = row.ring_begin; q < row.ring_end; ++q) {
          ASSERT_LT(q, s.first_position);                        // only what is in the ring already
          ASSERT_GT(q + cache_.ring_slots(), s.first_position);  // and not overwritten
          seen.push_back(q);
        }
        for (int64_t r = row.step_begin; r < row.step_end; ++r) {
          ASSERT_GE(r, s.row_begin);
          ASSERT_LT(r, s.row_begin + s.num_rows());
          seen.push_back(s.first_position + r - s.row_begin);
        }
        std::vector<int64_t> want;
        for (int64_t q = std::max<int64_t>(0, p - config_.sliding_window + 1); q <= p; ++q)
          want.push_back(q);
        ASSERT_EQ(seen, want) << "position " << p << " of a part from " << s.first_position;
        ASSERT_EQ(tables_.index[2][static_cast<size_t>(s.row_begin + i)].num_visible, (p + 1) / 2);
        ASSERT_EQ(tables_.index[1][static_cast<size_t>(s.row_begin + i)].num_visible, p + 1);
      }
  }
}

TEST_F(StepTablesTest, GroupsCompleteOnceWhateverTheCuts) {
  SeededRng rng(TestSeed(4));
  for (int round = 0; round < 100; ++round) {
    std::vector<int64_t> stored[3];
    for (int64_t at = 0; at < 200;) {
      const int64_t end = std::min<int64_t>(200, at + rng.Int(1, 30));
      Segment segment[] = {Part(0, at, end)};
      tables_.Build(segment, cache_);
      for (int ratio = 1; ratio <= 2; ++ratio) {
        const GroupTable& groups = tables_.groups[ratio];
        for (int64_t g = 0; g < groups.num_groups; ++g) {
          const size_t i = static_cast<size_t>(g);
          const int64_t group = groups.positions[i] / ratio;
          stored[ratio].push_back(group);
          const int64_t rows_per_page = 64 / ratio;
          ASSERT_EQ(
              groups.store_row[i],
              sequences_[0].pages[static_cast<size_t>(group / rows_per_page)] * rows_per_page +
                  group % rows_per_page);
          for (int64_t j = 0; j < ratio; ++j) {
            const int64_t p = group * ratio + j;
            const int64_t source = groups.sources[static_cast<size_t>(g * ratio + j)];
            ASSERT_EQ(source, p >= at ? p - at : -1 - KvCache::CarryRow(0, p));
          }
        }
      }
      at = end;
    }
    for (int ratio = 1; ratio <= 2; ++ratio) {
      std::vector<int64_t> want;
      for (int64_t g = 0; g < 200 / ratio; ++g)
        want.push_back(g);
      ASSERT_EQ(stored[ratio], want);
    }
  }
}

TEST_F(StepTablesTest, NoStoreHitsARowTwiceAndTheNewestWin) {
  Segment segments[] = {Part(0, 5, 105), Part(1, 0, 3)};
  tables_.Build(segments, cache_);
  for (const std::vector<int64_t>* list : {&tables_.ring_row, &tables_.carry_row}) {
    std::set<int64_t> rows;
    for (int64_t row : *list)
      if (row >= 0) {
        EXPECT_TRUE(rows.insert(row).second) << row;
      }
  }
  EXPECT_EQ(tables_.ring_row[99], cache_.RingRow(0, 104));
  EXPECT_EQ(tables_.ring_row[0], -1);
  EXPECT_EQ(tables_.ring_row[102], cache_.RingRow(1, 2));
  // Rejected drafts must not destroy what the next step needs.
  EXPECT_GE(cache_.ring_slots(), config_.sliding_window + limits::kMaxDrafts);
}

TEST_F(StepTablesTest, LogitsRowsAreTheLastOfTheirParts) {
  Segment segments[] = {Part(0, 0, 10), Part(1, 20, 26)};
  segments[0].logits_rows = 0;
  segments[1].logits_rows = 6;
  tables_.Build(segments, cache_);
  EXPECT_EQ(tables_.num_logits_rows, 6);
  ASSERT_EQ(tables_.logits_ranges.size(), 1u);
  EXPECT_EQ(tables_.logits_ranges[0], (std::pair<int64_t, int64_t>(10, 6)));
}

TEST_F(StepTablesTest, ADraftBlockSeesItselfAndTheCommittedWindow) {
  const std::vector<int32_t> ids = {1, 2, 2};
  Segment segment;
  segment.slot = 1;
  segment.sequence = &sequences_[1];
  segment.first_position = 30;
  segment.ids = ids;
  tables_.BuildDraft(std::span(&segment, 1), cache_);
  ASSERT_EQ(tables_.num_rows, 3);
  for (const AttentionRow& row : tables_.attention) {
    EXPECT_EQ(row.ring_first_row, cache_.RingRow(1, 0));
    EXPECT_EQ(row.ring_begin, 22);  // P - window: all rows see the same ones
    EXPECT_EQ(row.ring_end, 30);
    EXPECT_EQ(row.step_begin, 0);
    EXPECT_EQ(row.step_end, 3);
  }
  EXPECT_THAT(tables_.positions, ::testing::ElementsAre(30, 31, 32));
}

}  // namespace
}  // namespace twinspark
