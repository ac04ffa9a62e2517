// The draw on the CPU. The noise of a candidate costs ten rounds of Philox and two logarithms; the
// rounds are computed for vectors of those that could still win, the logarithms only where a bound
// of the noise does not rule a candidate out.
#include "kernels/sampling/draw.h"

#include <algorithm>
#include <cstring>

#include "kernels/sampling/scan_logits.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/sampling/draw_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/compress-inl.h"
#include "kernels/vec-inl.h"

#ifndef TWINSPARK_KERNELS_SAMPLING_DRAW_
#define TWINSPARK_KERNELS_SAMPLING_DRAW_
namespace twinspark {
namespace {

constexpr int64_t kNoiseBlock = 64;     // candidates whose noise is computed together
constexpr int64_t kMostLanes = 16;      // vectors are stored whole
constexpr float kLargestNoise = 22.9f;  // -ln(-ln(1 - 2^-33)) = 22.87

// Candidates that could still win when they were looked at.
struct NoiseBlock {
  int64_t count = 0;
  HWY_ALIGN uint32_t tokens[kNoiseBlock + kMostLanes] = {};
  HWY_ALIGN float logits[kNoiseBlock + kMostLanes] = {};
  HWY_ALIGN uint32_t words[kNoiseBlock + kMostLanes] = {};
};

}  // namespace
}  // namespace twinspark
#endif  // TWINSPARK_KERNELS_SAMPLING_DRAW_

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

// words[i] = NoiseWord(key, tokens[i]). Philox on numbers of 64 bits: only lower halves take part
// in products, so upper halves may hold anything. What does not depend on the token in the first
// three rounds and is not needed after the last is left out.
void NoiseWords(const NoiseKey& key, NoiseBlock& block) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t i = 0; i < block.count; ++i)
    block.words[i] = NoiseWord(key, block.tokens[i]);
#else
  constexpr int kNumRounds = 10;
  const hn::ScalableTag<uint64_t> d;
  const hn::Repartition<uint32_t, decltype(d)> d32;
  const hn::Rebind<uint32_t, decltype(d)> d_half;
  using V = hn::Vec<decltype(d)>;
  const auto m0 = hn::BitCast(d32, hn::Set(d, kPhiloxMultiplier0));
  const auto m1 = hn::BitCast(d32, hn::Set(d, kPhiloxMultiplier1));
  const auto upper = [](V p) HWY_ATTR { return hn::ShiftRight<32>(p); };
  const auto times = [&](V c, auto m) HWY_ATTR { return hn::MulEven(hn::BitCast(d32, c), m); };
  const auto set = [&](uint64_t word) HWY_ATTR { return hn::Set(d, word & 0xffffffffu); };
  uint32_t k0[kNumRounds], k1[kNumRounds];
  for (int r = 0; r < kNumRounds; ++r) {
    k0[r] = static_cast<uint32_t>(key.seed) + static_cast<uint32_t>(r) * kPhiloxWeyl0;
    k1[r] = static_cast<uint32_t>(key.seed >> 32) + static_cast<uint32_t>(r) * kPhiloxWeyl1;
  }
  // After the first round c0 = token ^ of_token, the others are numbers; after the second c0 and c1
  // are, and c2 = upper(m0 * old c0) ^ of_c2.
  const uint64_t p0 = kPhiloxMultiplier0 * key.position, p1 = kPhiloxMultiplier1 * key.choice;
  const uint64_t of_token = (p1 >> 32) ^ k0[0];
  const uint64_t q1 = kPhiloxMultiplier1 * (((p0 >> 32) ^ k1[0]) & 0xffffffffu);
  const uint64_t of_c2 = p0 ^ k1[1];
  const uint64_t c0_second = ((q1 >> 32) ^ p1 ^ k0[1]) & 0xffffffffu;
  const uint64_t r0 = kPhiloxMultiplier0 * c0_second;
  constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(d));
  constexpr int kSideBySide = 2;  // the rounds of a vector wait for each other
  for (int64_t i = 0; i < block.count; i += kSideBySide * kLanes) {
    V c0[kSideBySide], c1[kSideBySide], c2[kSideBySide], c3[kSideBySide];
    TWINSPARK_UNROLL
    for (int v = 0; v < kSideBySide; ++v) {
      const V token = hn::PromoteTo(d, hn::LoadU(d_half, block.tokens + i + v * kLanes));
      const V p = times(hn::Xor(token, set(of_token)), m0);  // the second round
      c1[v] = times(hn::Xor(upper(p), set(of_c2)), m1);      // the third
      c0[v] = hn::Xor(upper(c1[v]), set(q1 ^ k0[2]));
      c2[v] = hn::Xor(p, set((r0 >> 32) ^ k1[2]));
      c3[v] = set(r0);
    }
    TWINSPARK_UNROLL
    for (int r = 3; r < kNumRounds - 1; ++r) {
      TWINSPARK_UNROLL
      for (int v = 0; v < kSideBySide; ++v) {
        const V a = times(c0[v], m0), b = times(c2[v], m1);
        c0[v] = hn::Xor(hn::Xor(upper(b), c1[v]), set(k0[r]));
        c2[v] = hn::Xor(hn::Xor(upper(a), c3[v]), set(k1[r]));
        c1[v] = b;
        c3[v] = a;
      }
    }
    TWINSPARK_UNROLL
    for (int v = 0; v < kSideBySide; ++v) {
      const V word = hn::Xor(hn::Xor(upper(times(c2[v], m1)), c1[v]), set(k0[kNumRounds - 1]));
      hn::StoreU(hn::TruncateTo(d_half, word), d_half, block.words + i + v * kLanes);
    }
  }
#endif
}

// The next candidates from `from` on that could win; returns the first that was not looked at.
int64_t NextBlock(const Candidates& c, int64_t from, float best, NoiseBlock& block) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const VF least = hn::Set(d, best), noise = hn::Set(d, kLargestNoise);
  block.count = 0;
  int64_t i = from;
  for (; i + lanes <= c.count && block.count + lanes <= kNoiseBlock; i += lanes) {
    const VF logit = hn::LoadU(d, c.logits + i);
    const auto could = hn::Not(hn::Lt(hn::Add(logit, noise), least));
    if (hn::AllFalse(d, could)) continue;
    const KeptLanes<DF> kept(d, could);
    const auto ids =
        c.ids != nullptr ? hn::LoadU(di, c.ids + i) : hn::Iota(di, static_cast<int32_t>(i));
    hn::StoreU(kept.Together(logit), d, block.logits + block.count);
    hn::StoreU(kept.Together(ids), di, reinterpret_cast<int32_t*>(block.tokens) + block.count);
    block.count += kept.count();
  }
  if (i + lanes <= c.count) return i;
  for (; i < c.count && block.count < kNoiseBlock; ++i) {
    block.logits[block.count] = c.logits[i];
    block.tokens[block.count++] = static_cast<uint32_t>(c.id(i));
  }
  return i;
}

// Leaves those of a block that are not certainly below `best`: with x = 2^32 - 1 - word the noise
// -ln(-ln u) is below -ln(1 - u) = 32 ln 2 - ln(x + 1/2), and a float's bits give a lower bound of
// its logarithm. Sums are rounded as in the draw itself, and rounding keeps order.
void RuleOut(float best, NoiseBlock& block) {
  constexpr float kLn2 = 0.693147181f;
  constexpr float kSlack = 1e-3f;  // the bound is computed to 1e-5
  const DF d;
  const hn::RebindToSigned<DF> di;
  const hn::RebindToUnsigned<DF> du;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const VF least = hn::Set(d, best);
  const VF per_bit = hn::Set(d, -kLn2 * 0x1p-23f);
  const VF at_zero = hn::Set(d, (32 - 1 + 127) * kLn2 + kSlack);
  int64_t count = 0;
  for (int64_t i = 0; i < block.count; i += lanes) {
    const auto words = hn::Load(du, block.words + i);
    const auto half = hn::BitCast(di, hn::ShiftRight<1>(hn::Not(words)));
    const auto bits = hn::BitCast(di, hn::ConvertTo(d, half));
    const VF noise = hn::MulAdd(hn::ConvertTo(d, bits), per_bit, at_zero);
    const VF logit = hn::Load(d, block.logits + i);
    const auto inside = hn::Lt(hn::Iota(di, static_cast<int32_t>(i)),
                               hn::Set(di, static_cast<int32_t>(block.count)));
    const auto could =
        hn::And(hn::RebindMask(di, hn::Not(hn::Lt(hn::Add(logit, noise), least))), inside);
    if (hn::AllFalse(di, could)) continue;
    const KeptLanes<decltype(di)> kept(di, could);
    const auto tokens = hn::Load(du, block.tokens + i);
    hn::StoreU(kept.Together(logit), d, block.logits + count);
    hn::StoreU(kept.Together(words), du, block.words + count);
    hn::StoreU(kept.Together(tokens), du, block.tokens + count);
    count += kept.count();
  }
  block.count = count;
}

int32_t DrawToken(const NoiseKey& key, const Candidates& candidates) {
  float best = kMaskedLogit;
  int32_t token = -1;
  const auto draw = [&](float logit, int32_t id, uint32_t word) {
    const float value = logit + GumbelFromWord(word);
    if (value > best || (value == best && id < token)) {
      best = value;
      token = id;
    }
  };
  // The most likely one first: it rules out most of the others.
  const int64_t first = FirstOf(candidates.logits, candidates.count, candidates.largest, 0);
  if (first >= 0) {
    const int32_t id = candidates.id(first);
    draw(candidates.logits[first], id, NoiseWord(key, static_cast<uint32_t>(id)));
  }
  NoiseBlock block;
  for (int64_t i = 0; i < candidates.count;) {
    i = NextBlock(candidates, i, best, block);
    NoiseWords(key, block);
    RuleOut(best, block);
    for (int64_t k = 0; k < block.count; ++k)
      draw(block.logits[k], static_cast<int32_t>(block.tokens[k]), block.words[k]);
  }
  return token;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
HWY_EXPORT(DrawToken);

int32_t Draw(const NoiseKey& key, const Candidates& candidates) {
  return HWY_DYNAMIC_DISPATCH(DrawToken)(key, candidates);
}

}  // namespace twinspark
#endif  // HWY_ONCE
