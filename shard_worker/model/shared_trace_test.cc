// Any single flipped bit in what a step reads changes the trace; what it does not read does not.
#include "shard_worker/model/shared_trace.h"

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

#include "common/testing/seeded_rng.h"

namespace twinspark {
namespace {

TEST(SharedTraceTest, EveryBitOfEveryLengthCounts) {
  SeededRng rng(TestSeed(1));
  for (const size_t bytes : {1u, 7u, 8u, 63u, 64u, 65u, 200u}) {
    std::vector<uint8_t> data(bytes);
    for (uint8_t& byte : data)
      byte = static_cast<uint8_t>(rng.Next());
    SharedTrace clean;
    clean.AddBytes(data.data(), static_cast<int64_t>(bytes));
    for (size_t bit = 0; bit < 8 * bytes; ++bit) {
      data[bit / 8] = static_cast<uint8_t>(data[bit / 8] ^ 1u << (bit % 8));
      SharedTrace flipped;
      flipped.AddBytes(data.data(), static_cast<int64_t>(bytes));
      EXPECT_NE(flipped.digest(), clean.digest()) << bytes << " bytes, bit " << bit;
      data[bit / 8] = static_cast<uint8_t>(data[bit / 8] ^ 1u << (bit % 8));
    }
  }
}

TEST(SharedTraceTest, OrderCountsAndDisabledAddsNothing) {
  const uint64_t a = 1;
  const uint64_t b = 2;
  SharedTrace ab;
  ab.AddBytes(&a, 8);
  ab.AddBytes(&b, 8);
  SharedTrace ba;
  ba.AddBytes(&b, 8);
  ba.AddBytes(&a, 8);
  EXPECT_NE(ab.digest(), ba.digest());
  ab.SetEnabled(false);
  const uint64_t before = ab.digest();
  ab.AddBytes(&a, 8);
  EXPECT_EQ(ab.digest(), before);
}

// Two sequences in rings of 8 rows, the first one wrapped; only rows inside [ring_begin, ring_end)
// count.
TEST(SharedTraceTest, WindowCoversExactlyTheRowsThatAreRead) {
  constexpr int64_t kSlots = 8;
  std::vector<float> ring(2 * kSlots * 4, 1.0f);
  AttentionRow rows[3];
  rows[0].ring_first_row = rows[1].ring_first_row = 0;
  rows[0].ring_begin = 6;
  rows[0].ring_end = 10;
  rows[1].ring_begin = 7;
  rows[1].ring_end = 11;
  rows[2].ring_first_row = kSlots;
  rows[2].ring_begin = 0;
  rows[2].ring_end = 2;
  AttentionParams attend;
  attend.rows = rows;
  attend.ring = {ring.data(), CacheFormat::kF32, 2 * kSlots, 4};
  attend.ring_slots = kSlots;
  const auto trace = [&] {
    SharedTrace result;
    result.AddWindow(attend, 3);
    return result.digest();
  };
  const uint64_t clean = trace();
  for (int64_t row = 0; row < 2 * kSlots; ++row) {
    float& value = ring[static_cast<size_t>(row * 4 + 2)];
    value = -value;
    // Positions 6..10 of the first sequence lie in rows 6, 7, 0, 1, 2.
    const bool is_read = row < kSlots ? (row >= 6 || row <= 2) : row < kSlots + 2;
    EXPECT_EQ(trace() != clean, is_read) << row;
    value = -value;
  }
}

TEST(SharedTraceTest, SelectionCoversKeysThatAreVisibleAndRowsThatAreSelected) {
  constexpr int kRowsPerPage = 4;
  std::vector<float> keys(3 * kRowsPerPage, 1.0f);
  std::vector<float> values(3 * kRowsPerPage, 1.0f);
  const int32_t pages[] = {2, 0};  // groups 0..3 in page 2, 4..7 in page 0
  IndexRow index_row;
  index_row.pages = pages;
  index_row.num_visible = 6;
  std::vector<int32_t> selected = {1, 4};
  int32_t num_selected = 2;
  IndexSelectParams select;
  select.rows = &index_row;
  select.keys = {keys.data(), CacheFormat::kF32, 3 * kRowsPerPage, 1};
  select.rows_per_page = kRowsPerPage;
  select.selected = TensorView{selected.data(), DType::kI32, 1, 2, 2};
  select.num_selected = &num_selected;
  const CacheRows rows = {values.data(), CacheFormat::kF32, 3 * kRowsPerPage, 1};
  const auto trace = [&] {
    SharedTrace result;
    result.AddSelection(select, rows, 1);
    return result.digest();
  };
  const uint64_t clean = trace();
  for (int row = 0; row < 3 * kRowsPerPage; ++row) {
    const auto at = static_cast<size_t>(row);
    const int group = row >= 8 ? row - 8 : row < 4 ? row + 4 : -1;
    keys[at] = -1.0f;
    EXPECT_EQ(trace() != clean, group >= 0 && group < 6) << "key " << row;
    keys[at] = 1.0f;
    values[at] = -1.0f;
    EXPECT_EQ(trace() != clean, group == 1 || group == 4) << "row " << row;
    values[at] = 1.0f;
  }
}

}  // namespace
}  // namespace twinspark
