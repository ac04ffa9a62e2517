// Passes over logits on the CPU.
#include "kernels/sampling/scan_logits.h"

#include <algorithm>
#include <cmath>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/sampling/scan_logits_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/compress-inl.h"
#include "kernels/top_set-inl.h"
#include "kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

// The larger of x and best, which is no NaN; best where x is one.
HWY_INLINE VF LargerNumber([[maybe_unused]] DF d, VF x, VF best) {
#if HWY_ARCH_X86 && HWY_TARGET != HWY_SCALAR
  return hn::Max(x, best);  // x86 gives the second where there is a NaN
#else
  return hn::IfThenElse(hn::Gt(x, best), x, best);
#endif
}

// One pass, four chains, as one would be a chain of latencies. Zero times a value is zero unless
// the value is not finite. Blocks remember, lane by lane, which of them had the largest first.
LogitScan Scan(const float* logits, int64_t n) {
  constexpr int kChains = 4, kRounds = 4;
  const DF d;
  const hn::RebindToSigned<DF> di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t block = int64_t{kChains} * kRounds * lanes;
  const VF zero = hn::Zero(d);
  VF best = hn::Set(d, kMaskedLogit), rest[kChains] = {zero, zero, zero, zero};
  auto in_block = hn::Zero(di);
  int64_t i = 0;
  int32_t b = 0;
  for (; i + block <= n; i += block, ++b) {
    VF largest[kChains];
    TWINSPARK_UNROLL
    for (int c = 0; c < kChains; ++c)
      largest[c] = best;
    TWINSPARK_UNROLL
    for (int r = 0; r < kRounds; ++r) {
      TWINSPARK_UNROLL
      for (int c = 0; c < kChains; ++c) {
        const VF x = hn::LoadU(d, logits + i + int64_t{r * kChains + c} * lanes);
        largest[c] = LargerNumber(d, x, largest[c]);
        rest[c] = hn::MulAdd(x, zero, rest[c]);
      }
    }
    const VF most = hn::Max(hn::Max(largest[0], largest[1]), hn::Max(largest[2], largest[3]));
    in_block = hn::IfThenElse(hn::RebindMask(di, hn::Gt(most, best)), hn::Set(di, b), in_block);
    best = most;
  }
  LogitScan scan;
  scan.largest = hn::GetLane(hn::MaxOfLanes(d, best));
  const auto has = hn::RebindMask(di, hn::Eq(best, hn::Set(d, scan.largest)));
  const auto first = hn::IfThenElse(has, in_block, hn::Set(di, b));
  scan.first = hn::GetLane(hn::MinOfLanes(di, first)) * block;
  const VF sum = hn::Add(hn::Add(rest[0], rest[1]), hn::Add(rest[2], rest[3]));
  scan.finite = hn::AllTrue(d, hn::Eq(sum, zero));
  for (const int64_t tail = i; i < n; ++i) {
    if (logits[i] > scan.largest) {
      scan.largest = logits[i];
      scan.first = tail;
    }
    scan.finite = scan.finite && std::isfinite(logits[i]);
  }
  return scan;
}

int64_t Find(const float* logits, int64_t n, float value, int64_t from) {
  const DF d;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const VF wanted = hn::Set(d, value);
  int64_t i = from;
  for (; i + lanes <= n; i += lanes) {
    const intptr_t found = hn::FindFirstTrue(d, hn::Eq(hn::LoadU(d, logits + i), wanted));
    if (found >= 0) return i + found;
  }
  for (; i < n; ++i) {
    if (logits[i] == value) return i;
  }
  return -1;
}

void Divide(const float* logits, int64_t n, float by, float* out) {
  const DF d;
  const VF divisor = hn::Set(d, by);
  MapVectors<false>(d, n, out,
                    [&](const auto& load) HWY_ATTR { return hn::Div(load(logits), divisor); });
}

int64_t AtLeast(const float* logits, int64_t n, float least, int32_t* indices) {
  const DF d;
  const hn::RebindToSigned<DF> di;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const VF bound = hn::Set(d, least);
  int64_t i = 0, count = 0;
  for (; i + lanes <= n; i += lanes) {
    const auto keep = hn::Ge(hn::LoadU(d, logits + i), bound);
    if (hn::AllFalse(d, keep)) continue;
    const KeptLanes<DF> kept(d, keep);
    hn::StoreU(kept.Together(hn::Iota(di, static_cast<int32_t>(i))), di, indices + count);
    count += kept.count();
  }
  for (; i < n; ++i) {
    if (logits[i] >= least) indices[count++] = static_cast<int32_t>(i);
  }
  return count;
}

void Best(const float* logits, int64_t n, TopSet& set) {
  int64_t i = 0;
  for (; i + TopSet::kTile <= n; i += TopSet::kTile)
    OfferScores(set, logits + i, i, TopSet::kTile);
  if (i < n) {
    HWY_ALIGN float tail[TopSet::kTile];
    std::fill(std::copy(logits + i, logits + n, tail), tail + TopSet::kTile, TopSet::kMasked);
    OfferScores(set, tail, i, n - i);
  }
  Prune(set);
}

// e^x for x <= 0 in f64, off by less than 1e-12 of it: 2^k times the series of the rest up to the
// tenth power. Adding 1.5 * 2^52 rounds to an integer, which then lies in the low bits.
template <class D>
HWY_INLINE hn::Vec<D> ExpF64(D d, hn::Vec<D> x) {
  const hn::RebindToUnsigned<D> du;
  constexpr double kMagic = 0x1.8p52, kLog2e = 1.4426950408889634, kLn2 = 0.6931471805599453;
  constexpr double kLowest = -700;  // smaller results would not be normal numbers
  constexpr double kFactors[] = {1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720, 1.0 / 120,
                                 1.0 / 24,     1.0 / 6,     1.0 / 2,    1.0,       1.0};
  x = hn::Max(x, hn::Set(d, kLowest));
  const auto shifted = hn::MulAdd(x, hn::Set(d, kLog2e), hn::Set(d, kMagic));
  const auto k = hn::Sub(shifted, hn::Set(d, kMagic));
  const auto rest = hn::NegMulAdd(k, hn::Set(d, kLn2), x);
  auto sum = hn::Set(d, 1.0 / 3628800);
  TWINSPARK_UNROLL
  for (int i = 0; i < 10; ++i)
    sum = hn::MulAdd(sum, rest, hn::Set(d, kFactors[i]));
  const auto exponent = hn::ShiftLeft<52>(hn::BitCast(du, shifted));
  return hn::BitCast(d, hn::Add(hn::BitCast(du, sum), exponent));
}

double SumExp(const float* logits, int64_t n, float largest) {
  constexpr int kChains = 4;
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> df;
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto most = hn::Set(d, static_cast<double>(largest));
  hn::Vec<decltype(d)> sum[kChains];
  TWINSPARK_UNROLL
  for (int c = 0; c < kChains; ++c)
    sum[c] = hn::Zero(d);
  int64_t i = 0;
  for (; i + kChains * lanes <= n; i += kChains * lanes) {
    TWINSPARK_UNROLL
    for (int c = 0; c < kChains; ++c) {
      const auto x = hn::PromoteTo(d, hn::LoadU(df, logits + i + c * lanes));
      sum[c] = hn::Add(sum[c], ExpF64(d, hn::Sub(x, most)));
    }
  }
  double total =
      hn::GetLane(hn::SumOfLanes(d, hn::Add(hn::Add(sum[0], sum[1]), hn::Add(sum[2], sum[3]))));
  for (; i < n; ++i)
    total += std::exp(static_cast<double>(logits[i]) - static_cast<double>(largest));
  return total;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
namespace {
HWY_EXPORT(Scan);
HWY_EXPORT(Find);
HWY_EXPORT(Divide);
HWY_EXPORT(AtLeast);
HWY_EXPORT(Best);
HWY_EXPORT(SumExp);
}  // namespace

LogitScan ScanLogits(const float* logits, int64_t n) {
  return HWY_DYNAMIC_DISPATCH(Scan)(logits, n);
}
int64_t FirstOf(const float* logits, int64_t n, float value, int64_t from) {
  return HWY_DYNAMIC_DISPATCH(Find)(logits, n, value, from);
}
void DivideLogits(const float* logits, int64_t n, float by, float* out) {
  HWY_DYNAMIC_DISPATCH(Divide)(logits, n, by, out);
}
int64_t CollectAtLeast(const float* logits, int64_t n, float least, int32_t* indices) {
  return HWY_DYNAMIC_DISPATCH(AtLeast)(logits, n, least, indices);
}
void CollectBest(const float* logits, int64_t n, TopSet& set) {
  HWY_DYNAMIC_DISPATCH(Best)(logits, n, set);
}
double SumOfExp(const float* logits, int64_t n, float largest) {
  return HWY_DYNAMIC_DISPATCH(SumExp)(logits, n, largest);
}

}  // namespace twinspark
#endif  // HWY_ONCE
