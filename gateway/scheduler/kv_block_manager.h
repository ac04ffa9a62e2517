// The physical KV pages, one number space for all ranks: which are free. Knows no sequences:
// whoever takes pages keeps them and gives them back once. A page may be given to another sequence
// by the very next op, because the log is ordered. Pure; engine thread only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace twinspark::gateway {

class KvBlockManager {
 public:
  KvBlockManager() = default;
  explicit KvBlockManager(int32_t num_pages);

  // Pages that hold `num_positions` positions.
  static int32_t PagesFor(int64_t num_positions);

  // Appends `count` free pages to `pages`, or changes nothing and returns false.
  bool Take(int32_t count, std::vector<int32_t>& pages);

  // CHECKs that every page is in use.
  void GiveBack(std::span<const int32_t> pages);

  int32_t num_free() const { return static_cast<int32_t>(free_.size()); }
  int32_t num_used() const { return num_pages_ - num_free(); }
  int32_t num_pages() const { return num_pages_; }

 private:
  int32_t num_pages_ = 0;
  std::vector<int32_t> free_;  // a stack: the page freed last is still warm
  std::vector<bool> in_use_;
};

}  // namespace twinspark::gateway
