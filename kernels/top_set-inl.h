// Offering scores to a TopSet and pruning it, once per SIMD target.

// clang-format off
#if defined(TWINSPARK_KERNELS_TOP_SET_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TWINSPARK_KERNELS_TOP_SET_INL_H_
#undef TWINSPARK_KERNELS_TOP_SET_INL_H_
#else
#define TWINSPARK_KERNELS_TOP_SET_INL_H_
#endif
// clang-format on

#include <algorithm>
#include <cstdint>
#include <limits>

#include "hwy/highway.h"
#include "kernels/compress-inl.h"
#include "kernels/top_set.h"
#include "kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {

// Keys of scores: integers in the same order (-0 as 0).
HWY_INLINE hn::Vec<hn::RebindToSigned<DF>> OrderedKeys(DF d, VF score) {
  const hn::RebindToSigned<DF> di;
  const auto bits = hn::BitCast(di, hn::Add(score, hn::Zero(d)));
  return hn::Xor(bits, hn::And(hn::BroadcastSignBit(bits), hn::Set(di, 0x7fffffff)));
}

// Stores the lanes of `keep` next to each other, whole vectors; returns how many.
template <class V, class M>
HWY_INLINE int64_t StoreKept(V keys, V indices, M keep, int32_t* to_keys, int32_t* to_indices) {
  const hn::RebindToSigned<DF> di;
  const KeptLanes<decltype(di)> kept(di, keep);
  hn::StoreU(kept.Together(keys), di, to_keys);
  hn::StoreU(kept.Together(indices), di, to_indices);
  return kept.count();
}

HWY_INLINE int64_t CountAtLeast(const TopSet& set, int32_t key) {
  const hn::RebindToSigned<DF> di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(di));
  const auto below = hn::Set(di, key);
  auto less = hn::Zero(di);  // minus the number of smaller keys
  int64_t i = 0;
  for (; i + lanes <= set.count; i += lanes)
    less = hn::Add(less, hn::VecFromMask(di, hn::Lt(hn::LoadU(di, set.keys + i), below)));
  int64_t found = i + hn::GetLane(hn::SumOfLanes(di, less));
  for (; i < set.count; ++i)
    found += set.keys[i] >= key ? 1 : 0;
  return found;
}

// The largest key that at least `capacity` keys reach, or a lower one that exactly as many reach;
// kept: how many do. Narrowed between the smallest and the largest key, where the counts at both
// ends say that it lies, and every third time in the middle, which bounds the number of rounds.
HWY_INLINE int32_t DividingKey(const TopSet& set, int64_t& kept) {
  const hn::RebindToSigned<DF> di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(di));
  auto smallest = hn::Set(di, set.keys[0]), largest = smallest;
  int64_t i = 0;
  for (; i + lanes <= set.count; i += lanes) {
    const auto keys = hn::LoadU(di, set.keys + i);
    smallest = hn::Min(smallest, keys);
    largest = hn::Max(largest, keys);
  }
  int64_t low = hn::GetLane(hn::MinOfLanes(di, smallest));
  int64_t high = hn::GetLane(hn::MaxOfLanes(di, largest));
  for (; i < set.count; ++i) {
    low = std::min<int64_t>(low, set.keys[i]);
    high = std::max<int64_t>(high, set.keys[i]);
  }
  ++high;  // reached by none
  int64_t at_high = 0;
  kept = set.count;
  for (int round = 1; kept != set.capacity && high - low > 1; ++round) {
    const double part = round % 3 == 0 ? 0.5
                                       : static_cast<double>(kept - set.capacity) /
                                             static_cast<double>(kept - at_high);
    const int64_t step = static_cast<int64_t>(static_cast<double>(high - low) * part);
    const int64_t middle = low + std::clamp<int64_t>(step, 1, high - low - 1);
    const int64_t found = CountAtLeast(set, static_cast<int32_t>(middle));
    if (found < set.capacity) {
      high = middle;
      at_high = found;
    } else {
      low = middle;
      kept = found;
    }
  }
  return static_cast<int32_t>(low);
}

// Leaves the best `capacity`, still in order; among those equal to the dividing key the first ones
// stay.
inline void Prune(TopSet& set) {
  if (set.count <= set.capacity) return;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(DF()));
  int64_t kept = 0;
  const int32_t dividing = DividingKey(set, kept);
  const int64_t surplus = kept - set.capacity;  // of scores equal to the dividing one
  int64_t count = 0, i = 0;
  if (surplus == 0) {
    const hn::RebindToSigned<DF> di;
    for (; i + lanes <= set.count; i += lanes) {
      const auto keys = hn::LoadU(di, set.keys + i), indices = hn::LoadU(di, set.indices + i);
      const auto keep = hn::Not(hn::Lt(keys, hn::Set(di, dividing)));
      count += StoreKept(keys, indices, keep, set.keys + count, set.indices + count);
    }
  }
  int64_t allowed = std::numeric_limits<int64_t>::max();
  if (surplus > 0) allowed = set.capacity - CountAtLeast(set, dividing + 1);
  for (; i < set.count; ++i) {
    const int32_t key = set.keys[i];
    if (key < dividing || (key == dividing && allowed-- <= 0)) continue;
    set.keys[count] = key;
    set.indices[count++] = set.indices[i];
  }
  set.count = count;
  set.floor = TopSet::ScoreOf(dividing);  // at most the lowest that is kept
}

// Offers scores[0 .. count) of the indices from `first` on; count <= TopSet::kTile. Whole vectors
// are read: what lies behind `count` must be kMasked.
HWY_INLINE void OfferScores(TopSet& set, const float* scores, int64_t first, int64_t count) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const VF floor = hn::Set(d, set.floor);
  auto any = hn::Gt(floor, floor);
  for (int64_t i = 0; i < count; i += lanes)
    any = hn::Or(any, hn::Gt(hn::LoadU(d, scores + i), floor));
  if (hn::AllFalse(d, any)) return;
  for (int64_t i = 0; i < count; i += lanes) {
    const VF score = hn::LoadU(d, scores + i);
    const auto enters = hn::RebindMask(di, hn::Gt(score, floor));
    const auto indices = hn::Iota(di, static_cast<int32_t>(first + i));
    set.count += StoreKept(OrderedKeys(d, score), indices, enters, set.keys + set.count,
                           set.indices + set.count);
  }
  if (set.count >= 2 * set.capacity) Prune(set);
}

}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
