#include "gateway/scheduler/kv_block_manager.h"

#include "common/check.h"
#include "common/limits.h"

namespace twinspark::gateway {

KvBlockManager::KvBlockManager(int32_t num_pages)
    : num_pages_(num_pages), in_use_(static_cast<size_t>(num_pages), false) {
  free_.reserve(static_cast<size_t>(num_pages));
  for (int32_t page = num_pages - 1; page >= 0; --page)
    free_.push_back(page);
}

int32_t KvBlockManager::PagesFor(int64_t num_positions) {
  return static_cast<int32_t>((num_positions + limits::kPageTokens - 1) / limits::kPageTokens);
}

bool KvBlockManager::Take(int32_t count, std::vector<int32_t>& pages) {
  if (count > num_free()) return false;
  for (int32_t i = 0; i < count; ++i) {
    const int32_t page = free_.back();
    free_.pop_back();
    in_use_[static_cast<size_t>(page)] = true;
    pages.push_back(page);
  }
  return true;
}

void KvBlockManager::GiveBack(std::span<const int32_t> pages) {
  for (const int32_t page : pages) {
    CHECK(page >= 0 && page < num_pages_) << "page " << page << " of " << num_pages_;
    CHECK(in_use_[static_cast<size_t>(page)]) << "page " << page << " given back twice";
    in_use_[static_cast<size_t>(page)] = false;
    free_.push_back(page);
  }
}

}  // namespace twinspark::gateway
