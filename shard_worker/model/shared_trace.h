// A running hash over what every rank of a step computes or reads alike: activations that enter the
// split matrices, the router's choice, the cached rows and keys that attention and indexer read.
// Ranks compare it in the digest of every op.
//
// Why the final residual streams alone are not enough: what a rank computes wrongly from a wrong
// replicated value (a norm weight, a cached row) goes through its own heads or experts into the
// all-reduce, so both ranks get the same wrong streams. The wrong value itself is on one rank only,
// and it is seen here.
//
// Cost: one pass over bytes that the step reads anyway, at 32 GB/s from the cache (a busy core of
// the build machine, 2026-12-01): 21 us per decoding sequence for a model with 10 layers. Off for
// one rank. Step thread only.
#pragma once

#include <array>
#include <cstdint>

#include "kernels/attention/attention.h"
#include "kernels/indexer/index_select.h"
#include "kernels/quant/cache_format.h"
#include "kernels/tensor_view.h"

namespace twinspark {

class SharedTrace {
 public:
  void SetEnabled(bool enabled) { enabled_ = enabled; }
  void Reset() { lanes_ = kStart; }
  uint64_t digest() const;

  void AddBytes(const void* data, int64_t bytes);
  void Add(const ConstTensorView& view);
  // Ring rows that the step's rows attend to, each once per sequence, and the rows of the step
  // itself.
  void AddWindow(const AttentionParams& attend, int64_t num_rows);
  // The selection, all visible index keys, and the compressed rows that were selected.
  void AddSelection(const IndexSelectParams& select, const CacheRows& rows, int64_t num_rows);

 private:
  static constexpr int kLanes = 8;
  using Lanes = std::array<uint64_t, kLanes>;
  static constexpr Lanes kStart = {0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB,
                                   0x2545F4914F6CDD1D, 0xD6E8FEB86659FD93, 0xA0761D6478BD642F,
                                   0xE7037ED1A0B428DB, 0x8EBC6AF09C88C6E3};

  void AddPages(const CacheRows& rows, const int32_t* pages, int rows_per_page, int64_t count);

  bool enabled_ = true;
  Lanes lanes_ = kStart;
};

}  // namespace twinspark
