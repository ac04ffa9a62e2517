// Pages and the queue: nothing is given twice, nothing is lost, order is that of arrival.
#include "gateway/scheduler/kv_block_manager.h"

#include <set>

#include <gtest/gtest.h>

#include "gateway/scheduler/admission_queue.h"

namespace twinspark::gateway {
namespace {

TEST(KvBlockManager, GivesEveryPageOnce) {
  KvBlockManager blocks(10);
  std::vector<int32_t> a;
  std::vector<int32_t> b;
  EXPECT_TRUE(blocks.Take(6, a));
  EXPECT_FALSE(blocks.Take(5, b));
  EXPECT_TRUE(b.empty());
  EXPECT_TRUE(blocks.Take(4, b));
  std::set<int32_t> all(a.begin(), a.end());
  all.insert(b.begin(), b.end());
  EXPECT_EQ(all.size(), 10u);
  EXPECT_EQ(*all.rbegin(), 9);
  EXPECT_EQ(blocks.num_free(), 0);
  blocks.GiveBack(a);
  EXPECT_EQ(blocks.num_free(), 6);
  EXPECT_EQ(blocks.num_used(), 4);
}

TEST(KvBlockManagerDeathTest, PageGivenBackTwice) {
  KvBlockManager blocks(4);
  std::vector<int32_t> pages;
  ASSERT_TRUE(blocks.Take(1, pages));
  blocks.GiveBack(pages);
  EXPECT_DEATH(blocks.GiveBack(pages), "twice");
}

TEST(KvBlockManager, PagesForPositions) {
  EXPECT_EQ(KvBlockManager::PagesFor(0), 0);
  EXPECT_EQ(KvBlockManager::PagesFor(1), 1);
  EXPECT_EQ(KvBlockManager::PagesFor(64), 1);
  EXPECT_EQ(KvBlockManager::PagesFor(65), 2);
}

TEST(AdmissionQueue, BoundedForNewcomersOnly) {
  AdmissionQueue queue(2);
  EXPECT_TRUE(queue.Push(5));
  EXPECT_TRUE(queue.Push(6));
  EXPECT_FALSE(queue.Push(7));
  queue.PutBack(3);  // had a slot before
  EXPECT_EQ(queue.size(), 3u);
  EXPECT_EQ(queue.Front(), 3u);
  EXPECT_TRUE(queue.Remove(3));
  EXPECT_FALSE(queue.Remove(3));
  EXPECT_EQ(queue.Front(), 5u);
}

}  // namespace
}  // namespace twinspark::gateway
