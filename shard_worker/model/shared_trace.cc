// See shared_trace.h.
#include "shard_worker/model/shared_trace.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include <xxhash.h>

namespace twinspark {

namespace {

inline uint64_t Load(const unsigned char* at) {
  uint64_t word;
  std::memcpy(&word, at, sizeof(word));
  return word;
}

}  // namespace

// Eight independent lanes of rotate and xor: any one flipped bit changes the result, and the order
// of words counts. Mixing is left to digest(). The lanes are named variables so that they stay in
// registers.
void SharedTrace::AddBytes(const void* data, int64_t bytes) {
  if (!enabled_ || bytes <= 0) return;
  const auto* at = static_cast<const unsigned char*>(data);
  constexpr int64_t kBlock = kLanes * int64_t{8};
  uint64_t a = lanes_[0], b = lanes_[1], c = lanes_[2], d = lanes_[3];
  uint64_t e = lanes_[4], f = lanes_[5], g = lanes_[6], h = lanes_[7];
  const auto add = [&](const unsigned char* block) {
    a = std::rotl(a, 7) ^ Load(block);
    b = std::rotl(b, 7) ^ Load(block + 8);
    c = std::rotl(c, 7) ^ Load(block + 16);
    d = std::rotl(d, 7) ^ Load(block + 24);
    e = std::rotl(e, 7) ^ Load(block + 32);
    f = std::rotl(f, 7) ^ Load(block + 40);
    g = std::rotl(g, 7) ^ Load(block + 48);
    h = std::rotl(h, 7) ^ Load(block + 56);
  };
  for (; bytes >= kBlock; bytes -= kBlock, at += kBlock)
    add(at);
  if (bytes > 0) {
    unsigned char last[kBlock] = {};
    std::memcpy(last, at, static_cast<size_t>(bytes));
    add(last);
  }
  lanes_ = {a, b, c, d, e, f, g, h};
}

uint64_t SharedTrace::digest() const {
  return XXH64(lanes_.data(), sizeof(lanes_), 0);
}

void SharedTrace::Add(const ConstTensorView& view) {
  if (!enabled_ || view.empty()) return;
  const auto element = static_cast<int64_t>(DTypeBytes(view.dtype));
  if (view.row_stride == view.cols) {
    AddBytes(view.data, view.rows * view.cols * element);
    return;
  }
  const auto* row = static_cast<const char*>(view.data);
  for (int64_t r = 0; r < view.rows; ++r, row += view.row_stride * element) {
    AddBytes(row, view.cols * element);
  }
}

void SharedTrace::AddWindow(const AttentionParams& attend, int64_t num_rows) {
  if (!enabled_) return;
  AddBytes(attend.step_rows.data, attend.step_rows.num_rows * attend.step_rows.row_bytes());
  const int64_t row_bytes = attend.ring.row_bytes();
  const auto* ring = static_cast<const char*>(attend.ring.data);
  for (int64_t t = 0; t < num_rows;) {
    // Neighbouring rows of one sequence see nearly the same positions: their union once.
    const int64_t base = attend.rows[t].ring_first_row;
    int64_t begin = attend.rows[t].ring_begin;
    int64_t end = attend.rows[t].ring_end;
    for (; t < num_rows && attend.rows[t].ring_first_row == base; ++t) {
      begin = std::min(begin, attend.rows[t].ring_begin);
      end = std::max(end, attend.rows[t].ring_end);
    }
    begin = std::max(begin, end - attend.ring_slots);
    while (begin < end) {
      const int64_t slot = begin % attend.ring_slots;
      const int64_t count = std::min(end - begin, attend.ring_slots - slot);
      AddBytes(ring + (base + slot) * row_bytes, count * row_bytes);
      begin += count;
    }
  }
}

void SharedTrace::AddPages(const CacheRows& rows,
                           const int32_t* pages,
                           int rows_per_page,
                           int64_t count) {
  const int64_t row_bytes = rows.row_bytes();
  const auto* data = static_cast<const char*>(rows.data);
  for (int64_t page = 0; page * rows_per_page < count; ++page) {
    const int64_t in_page = std::min<int64_t>(rows_per_page, count - page * rows_per_page);
    AddBytes(data + int64_t{pages[page]} * rows_per_page * row_bytes, in_page * row_bytes);
  }
}

void SharedTrace::AddSelection(const IndexSelectParams& select,
                               const CacheRows& rows,
                               int64_t num_rows) {
  if (!enabled_) return;
  const int64_t row_bytes = rows.row_bytes();
  const auto* data = static_cast<const char*>(rows.data);
  for (int64_t t = 0; t < num_rows;) {
    const int32_t* pages = select.rows[t].pages;
    const int64_t first = t;
    int64_t visible = 0;
    int64_t selected = 0;
    for (; t < num_rows && select.rows[t].pages == pages; ++t) {
      visible = std::max(visible, select.rows[t].num_visible);
      selected += select.num_selected[t];
      AddBytes(select.selected.Row<int32_t>(t), select.num_selected[t] * int64_t{4});
    }
    if (visible == 0) continue;
    AddPages(select.keys, pages, select.rows_per_page, visible);
    if (selected >= visible) {
      AddPages(rows, pages, select.rows_per_page, visible);
      continue;
    }
    for (int64_t row = first; row < t; ++row) {
      const int32_t* groups = select.selected.Row<int32_t>(row);
      for (int i = 0; i < select.num_selected[row]; ++i) {
        const int64_t physical =
            int64_t{pages[groups[i] / select.rows_per_page]} * select.rows_per_page +
            groups[i] % select.rows_per_page;
        AddBytes(data + physical * row_bytes, row_bytes);
      }
    }
  }
}

}  // namespace twinspark
