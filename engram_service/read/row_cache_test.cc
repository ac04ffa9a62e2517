// The cache against a plain map (every find gives the bytes that were put in, or nothing), and its
// hit rate on a Zipf stream against an exact S3-FIFO and an exact LRU. Memory stays in the arena.
#include "engram_service/read/row_cache.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <deque>
#include <fstream>
#include <list>
#include <map>
#include <string>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <gtest/gtest.h>

#include "common/testing/seeded_rng.h"

namespace twinspark::engram {
namespace {

RowCacheShape SmallShape() {
  return {2, 2, 32, 1};
}

NgramKey Key(uint32_t order, int32_t a) {
  NgramKey key;
  key.order = order;
  for (uint32_t i = 0; i < order; ++i)
    key.ids[i] = a + static_cast<int32_t>(i);
  return key;
}

void Fill(RowCache& cache, RowCache::Ref ref, uint32_t layer, int32_t value) {
  const RowCacheShape& shape = cache.shape();
  memset(cache.Weights(ref, layer), value & 0x7f, shape.heads * shape.weight_bytes);
  memset(cache.Scales(ref, layer), (value >> 7) & 0x7f, shape.heads * shape.scale_bytes);
  for (uint32_t head = 0; head < shape.heads; ++head)
    cache.MarkFilled(ref, layer, head);
}

TEST(RowCache, FindsWhatWasPutInAndNothingElse) {
  SeededRng rng(TestSeed(51));
  auto made = RowCache::Create(SmallShape(), 200 * 1024);
  ASSERT_TRUE(made.ok()) << made.status();
  RowCache& cache = **made;
  ASSERT_GT(cache.capacity(), 500u);
  std::map<std::pair<uint32_t, int32_t>, RowCache::Ref> seen;
  for (int i = 0; i < 200000; ++i) {
    const auto order = static_cast<uint32_t>(rng.Int(2, 4));
    const auto id = static_cast<int32_t>(rng.OneIn(2) ? rng.Int(0, 300) : rng.Int(0, 20000));
    const RowCache::Ref found = cache.Find(Key(order, id));
    const auto before = seen.find({order, id});
    // An entry is found exactly as long as its reference is alive.
    ASSERT_EQ(found.valid(), before != seen.end() && cache.alive(before->second));
    if (found.valid()) {
      ASSERT_EQ(found.slot, before->second.slot);
      for (uint32_t layer = 0; layer < 2; ++layer) {
        if (!cache.Complete(found, layer)) continue;
        ASSERT_EQ(cache.Weights(found, layer)[63], id & 0x7f);
        ASSERT_EQ(cache.Scales(found, layer)[1], (id >> 7) & 0x7f);
      }
      if (rng.OneIn(2)) Fill(cache, found, 1, id);
      continue;
    }
    const RowCache::Ref ref = cache.Insert(Key(order, id));
    ASSERT_FALSE(cache.Complete(ref, 0));
    ASSERT_FALSE(cache.Complete(ref, 1));
    Fill(cache, ref, 0, id);
    seen[{order, id}] = ref;
    ASSERT_LE(cache.size(), cache.capacity());
  }
  EXPECT_EQ(cache.size(), cache.capacity());
}

TEST(RowCache, OneMissingHeadIsNotALayer) {
  auto made = RowCache::Create(SmallShape(), 64 * 1024);
  ASSERT_TRUE(made.ok());
  RowCache& cache = **made;
  const RowCache::Ref ref = cache.Insert(Key(2, 5));
  cache.MarkFilled(ref, 0, 0);
  EXPECT_FALSE(cache.Complete(ref, 0));
  cache.MarkFilled(ref, 0, 1);
  EXPECT_TRUE(cache.Complete(ref, 0));
  EXPECT_FALSE(cache.Complete(ref, 1));
}

TEST(RowCache, RefusesSizesWithoutUse) {
  EXPECT_FALSE(RowCache::Create(SmallShape(), 100).ok());
  EXPECT_FALSE(RowCache::Create(SmallShape(), size_t{1} << 60).ok());
}

uint64_t ResidentBytes() {
  std::ifstream file("/proc/self/statm");
  uint64_t pages = 0;
  uint64_t resident = 0;
  file >> pages >> resident;
  return resident * 4096;
}

TEST(RowCache, MemoryIsTheArenaFromTheStart) {
  const uint64_t before = ResidentBytes();
  constexpr size_t kBytes = size_t{64} << 20;
  auto made = RowCache::Create({4, 2, 256, 8}, kBytes);
  ASSERT_TRUE(made.ok());
  RowCache& cache = **made;
  EXPECT_LE(cache.arena_bytes(), kBytes + 64 * 1024);
  const uint64_t made_bytes = ResidentBytes();
#ifndef TWINSPARK_SANITIZER
  EXPECT_LE(made_bytes - before, kBytes + (size_t{4} << 20));
#endif
  EXPECT_GE(made_bytes - before, kBytes * 8 / 10);
  for (int32_t i = 0; i < 200000; ++i)
    Fill(cache, cache.Insert(Key(2, i * 3)), 0, i);
#ifndef TWINSPARK_SANITIZER  // a sanitizer's shadow grows with what is touched
  EXPECT_LE(ResidentBytes(), made_bytes + (size_t{2} << 20));
#endif
}

// Entries come as the memory does: nothing is found that was not put in, nothing is refused once
// all is there, and Create does not wait for it.
TEST(RowCache, PopulatedBehindTheStart) {
  constexpr size_t kBytes = size_t{256} << 20;
  auto made = RowCache::Create({4, 2, 256, 8}, kBytes, RowCache::Populate::kBehind);
  ASSERT_TRUE(made.ok()) << made.status();
  RowCache& cache = **made;
  EXPECT_FALSE(cache.Insert(Key(3, 1)).valid()) << "before anything is there";
  cache.PopulateBehind();
  std::map<int32_t, RowCache::Ref> put;
  int32_t id = 0;
  int refused = 0;
  while (cache.usable() < cache.capacity()) {
    const RowCache::Ref ref = cache.Insert(Key(2, id * 5));
    if (!ref.valid()) {
      ++refused;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
      continue;
    }
    ASSERT_LT(ref.slot, cache.usable());
    Fill(cache, ref, 0, id);
    put[id++] = ref;
  }
  EXPECT_EQ(cache.populate_error(), 0);
  for (; cache.size() < cache.capacity(); ++id) {
    const RowCache::Ref ref = cache.Insert(Key(2, id * 5));
    ASSERT_TRUE(ref.valid());
    Fill(cache, ref, 0, id);
    put[id] = ref;
  }
  for (const auto& [key, ref] : put) {
    ASSERT_EQ(cache.Find(Key(2, key * 5)).slot, ref.slot);
    ASSERT_EQ(cache.Weights(ref, 0)[1023], key & 0x7f);
  }
  printf("%d of %d insertions came before their memory\n", refused, refused + id);
}

TEST(RowCache, MoreThanTheMachineHasIsRefusedAtOnce) {
  const auto made = RowCache::Create({4, 2, 256, 8}, size_t{1} << 40, RowCache::Populate::kBehind);
  EXPECT_EQ(made.status().code(), absl::StatusCode::kResourceExhausted) << made.status();
}

// Exact S3-FIFO with the same parameters: small queue 10 %, ghost as many entries as the cache.
class ExactS3Fifo {
 public:
  explicit ExactS3Fifo(size_t capacity) : capacity_(capacity), small_max_(capacity / 10) {}
  bool Access(uint64_t key) {
    const auto it = count_.find(key);
    if (it != count_.end()) {
      it->second = std::min(3, it->second + 1);
      return true;
    }
    while (small_.size() + main_.size() >= capacity_)
      Evict();
    if (ghost_set_.count(key) != 0) {
      main_.push_back(key);
    } else {
      small_.push_back(key);
    }
    count_[key] = 0;
    return false;
  }

 private:
  void Evict() {
    if (small_.size() >= small_max_ || main_.empty()) {
      const uint64_t key = small_.front();
      small_.pop_front();
      if (count_[key] > 0) {
        count_[key] = 0;
        main_.push_back(key);
        return;
      }
      count_.erase(key);
      ghost_.push_back(key);
      ghost_set_.insert(key);
      if (ghost_.size() > capacity_) {
        ghost_set_.erase(ghost_.front());
        ghost_.pop_front();
      }
      return;
    }
    const uint64_t key = main_.front();
    main_.pop_front();
    if (count_[key] > 0) {
      --count_[key];
      main_.push_back(key);
    } else {
      count_.erase(key);
    }
  }
  const size_t capacity_;
  const size_t small_max_;
  std::deque<uint64_t> small_;
  std::deque<uint64_t> main_;
  std::deque<uint64_t> ghost_;
  std::unordered_set<uint64_t> ghost_set_;
  std::unordered_map<uint64_t, int> count_;
};

class ExactLru {
 public:
  explicit ExactLru(size_t capacity) : capacity_(capacity) {}
  bool Access(uint64_t key) {
    const auto it = where_.find(key);
    if (it != where_.end()) {
      order_.splice(order_.begin(), order_, it->second);
      return true;
    }
    if (where_.size() == capacity_) {
      where_.erase(order_.back());
      order_.pop_back();
    }
    order_.push_front(key);
    where_[key] = order_.begin();
    return false;
  }

 private:
  const size_t capacity_;
  std::list<uint64_t> order_;
  std::unordered_map<uint64_t, std::list<uint64_t>::iterator> where_;
};

// Draws of a Zipf law by inversion of the cumulative sum.
class Zipf {
 public:
  Zipf(size_t vocabulary, double exponent) : sum_(vocabulary) {
    double total = 0;
    for (size_t i = 0; i < vocabulary; ++i) {
      total += std::pow(static_cast<double>(i + 1), -exponent);
      sum_[i] = total;
    }
  }
  size_t Draw(SeededRng& rng) const {
    const double at = rng.Unit() * sum_.back();
    return static_cast<size_t>(std::upper_bound(sum_.begin(), sum_.end(), at) - sum_.begin());
  }

 private:
  std::vector<double> sum_;
};

struct OrderLaw {
  double exponent;
  size_t vocabulary;
  std::map<size_t, double> unique;  // chunk size > share of first occurrences
};

// Zipf parameters of each order, fitted to the shares of source code (reuse_stats.json, "code").
const std::map<uint32_t, OrderLaw>& CodeLaws() {
  static const std::map<uint32_t, OrderLaw> kLaws = {
      {2,
       {0.96,
        3000,
        {{6, 0.992},
         {64, 0.789},
         {256, 0.608},
         {512, 0.523},
         {1024, 0.445},
         {2048, 0.375},
         {4096, 0.311}}}},
      {3,
       {0.92,
        10000,
        {{6, 0.997},
         {64, 0.868},
         {256, 0.73},
         {512, 0.656},
         {1024, 0.586},
         {2048, 0.519},
         {4096, 0.451}}}},
      {4,
       {0.92,
        30000,
        {{6, 0.998},
         {64, 0.909},
         {256, 0.798},
         {512, 0.736},
         {1024, 0.674},
         {2048, 0.613},
         {4096, 0.548}}}},
  };
  return kLaws;
}

// The stream repeats itself as source code does: within 10 % at every chunk size.
TEST(RowCache, StreamHasTheReuseOfSourceCode) {
  SeededRng rng(TestSeed(53));
  for (const auto& [order, law] : CodeLaws()) {
    const Zipf zipf(law.vocabulary, law.exponent);
    for (const auto& [chunk, want] : law.unique) {
      double unique = 0;
      const int chunks = static_cast<int>(std::max<size_t>(8, 40000 / chunk));
      for (int i = 0; i < chunks; ++i) {
        std::unordered_set<size_t> seen;
        for (size_t t = 0; t < chunk; ++t)
          seen.insert(zipf.Draw(rng));
        unique += static_cast<double>(seen.size()) / static_cast<double>(chunk) / chunks;
      }
      EXPECT_NEAR(unique, want, 0.1 * want) << "order " << order << " chunk " << chunk;
    }
  }
}

// Hit rates of the cache and of both exact policies on that stream.
TEST(RowCache, HitRateOfSourceCodeAgainstExactPolicies) {
  SeededRng rng(TestSeed(52));
  std::map<uint32_t, Zipf> zipf;
  for (const auto& [order, law] : CodeLaws()) {
    zipf.emplace(order, Zipf(law.vocabulary, law.exponent));
  }
  auto made = RowCache::Create(SmallShape(), size_t{4} << 20);
  ASSERT_TRUE(made.ok());
  RowCache& cache = **made;
  ExactS3Fifo s3(cache.capacity());
  ExactLru lru(cache.capacity());
  double hits[3] = {};
  constexpr int kTokens = 300000;
  int counted = 0;
  for (int t = 0; t < kTokens; ++t) {
    for (const auto& [order, law] : zipf) {
      const size_t id = law.Draw(rng);
      const NgramKey key = Key(order, static_cast<int32_t>(id));
      const uint64_t name = id * 8 + order;
      const bool hit = cache.Find(key).valid();
      if (!hit) cache.Insert(key);
      const bool results[3] = {hit, s3.Access(name), lru.Access(name)};
      if (t < kTokens / 2) continue;
      ++counted;
      for (int i = 0; i < 3; ++i)
        hits[i] += results[i] ? 1 : 0;
    }
  }
  for (double& value : hits)
    value /= counted;
  printf("capacity %u n-grams: cache %.4f, exact S3-FIFO %.4f, exact LRU %.4f\n", cache.capacity(),
         hits[0], hits[1], hits[2]);
  EXPECT_NEAR(hits[0], hits[1], 0.01);
  EXPECT_GT(hits[0], hits[2] - 0.005);
}

}  // namespace
}  // namespace twinspark::engram
