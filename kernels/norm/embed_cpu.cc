// Embedding gather on the CPU: a row is read once and stored to every stream, converted when the
// activation type differs.
#include "kernels/norm/embed.h"

#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/norm/embed_cpu.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/parallel_rows.h"
#include "kernels/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace twinspark {
namespace HWY_NAMESPACE {
namespace {

// A row of `bytes` to num_copies places, one after the other. Values that keep their type keep
// their bits.
inline void CopyBytes(const uint8_t* HWY_RESTRICT from,
                      int64_t bytes,
                      int num_copies,
                      uint8_t* HWY_RESTRICT to) {
  const hn::ScalableTag<uint8_t> d8;
  constexpr int64_t kPiece = 8;  // vectors that wait in registers
  const int64_t lanes = static_cast<int64_t>(hn::Lanes(d8));
  constexpr int64_t kLongRow = 4096;  // the C library writes long runs faster
  int64_t i = 0;
  for (; bytes <= kLongRow && i + kPiece * lanes <= bytes; i += kPiece * lanes) {
    hn::Vec<decltype(d8)> piece[kPiece];
    TWINSPARK_UNROLL
    for (int64_t v = 0; v < kPiece; ++v)
      piece[v] = hn::LoadU(d8, from + i + v * lanes);
    for (int c = 0; c < num_copies; ++c) {
      TWINSPARK_UNROLL
      for (int64_t v = 0; v < kPiece; ++v)
        hn::StoreU(piece[v], d8, to + c * bytes + i + v * lanes);
    }
  }
  for (int c = 0; c < num_copies && i < bytes; ++c)
    std::memcpy(to + c * bytes + i, from + i, static_cast<size_t>(bytes - i));
}

template <class T>
HWY_INLINE void CopyRow(const T* in, int64_t d, int num_copies, T* out) {
  CopyBytes(reinterpret_cast<const uint8_t*>(in), d * static_cast<int64_t>(sizeof(T)), num_copies,
            reinterpret_cast<uint8_t*>(out));
}
template <class In, class Out>
void CopyRow(const In* in, int64_t d, int num_copies, Out* out) {
  ForVectors(DF(), d, [&](const auto& load, const auto& store) HWY_ATTR {
    const VF values = load(in);
    for (int c = 0; c < num_copies; ++c)
      store(values, out + c * d);
  });
}

// Rows of the table lie where the ids say, which the hardware does not foresee.
template <class In>
HWY_INLINE void PrefetchRow(const EmbedParams& p, int64_t row) {
  constexpr int64_t kLine = 64, kMostLines = 16;
  if (row < 0 || row >= p.table.rows) return;
  const char* at = reinterpret_cast<const char*>(p.table.Row<In>(row));
  const int64_t bytes = p.table.cols * static_cast<int64_t>(sizeof(In));
  for (int64_t i = 0; i < std::min(bytes, kMostLines * kLine); i += kLine)
    __builtin_prefetch(at + i);
}

void EmbedRows(const EmbedParams& p, int64_t begin, int64_t end) {
  const int64_t d = p.table.cols;
  WithFloatType(p.table.dtype, [&](auto* in_type) {
    WithFloatType(p.out.dtype, [&](auto* out_type) {
      using In = std::remove_pointer_t<decltype(in_type)>;
      using Out = std::remove_pointer_t<decltype(out_type)>;
      for (int64_t t = begin; t < end; ++t) {
        const int64_t row = p.ids[t] - p.first_id;
        if (t + 1 < end) PrefetchRow<In>(p, p.ids[t + 1] - p.first_id);
        Out* out = p.out.Row<Out>(t);
        if (row < 0 || row >= p.table.rows) {
          std::fill(out, out + p.num_copies * d, Out{});
        } else {
          CopyRow(p.table.Row<In>(row), d, p.num_copies, out);
        }
      }
    });
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace twinspark
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace twinspark {
HWY_EXPORT(EmbedRows);

void EmbedCpu(const EmbedParams& params, const Launch& launch) {
  CHECK_EQ(params.out.cols, params.num_copies * params.table.cols);
  const int64_t grain = RowGrain(0.1 * static_cast<double>(params.out.cols));
  ParallelRows(launch, params.out.rows, grain, [&](int64_t begin, int64_t end, int) {
    HWY_DYNAMIC_DISPATCH(EmbedRows)(params, begin, end);
  });
}

}  // namespace twinspark
#endif  // HWY_ONCE
