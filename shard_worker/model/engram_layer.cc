// The Engram block, model specification 3.11: which rows a step needs, the hint for the next ones,
// rows of all ranks put together, the gate. Members of Forward (forward.h).
#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "shard_worker/model/forward.h"

namespace twinspark {

// The rows of `segments` with the ids before them. The ranges hold until the next call.
void Forward::FillRowRanges(std::span<const Segment> segments) {
  row_ranges_.clear();
  dead_.clear();
  size_t num_dead = 0;
  for (const Segment& s : segments)
    num_dead += static_cast<size_t>(s.num_rows()) + 3;
  dead_.reserve(num_dead);  // spans into it must stay
  for (const Segment& s : segments) {
    RowRange range;
    range.slot = s.slot;
    range.first_position = s.first_position;
    const int64_t history = std::min<int64_t>(3, s.first_position);
    range.history =
        std::span(s.sequence->ids)
            .subspan(static_cast<size_t>(s.first_position - history), static_cast<size_t>(history));
    range.ids = s.ids;
    if (!s.sequence->image_mask.empty()) {
      const size_t begin = dead_.size();
      for (int64_t p = s.first_position - history; p < s.first_position + s.num_rows(); ++p)
        dead_.push_back(s.sequence->IsImage(p) ? 1 : 0);
      range.dead = std::span(dead_).subspan(begin);
    }
    row_ranges_.push_back(range);
  }
}

void Forward::HintRows(std::span<const Segment> next, RowClass row_class) {
  if (next.empty() || rows_ == nullptr || c_.engram_layer_ids.empty()) return;
  FillRowRanges(next);
  rows_->Hint(row_ranges_, row_class);
}

absl::Status Forward::EngramBlock(int layer) {
  const EngramWeights& w = *w_.blocks[static_cast<size_t>(layer)].engram;
  ConstTensorView codes;
  ConstTensorView scales;
  RETURN_IF_ERROR(
      GatherEngramRows(c_.layers[static_cast<size_t>(layer)].engram_module, codes, scales));
  // e = concat over the columns of round(e4m3 * 2^(scale - 127)); kv = wkv e
  const TensorView values = ws_.row_values.Rows(t_);
  const TensorView kv = ws_.engram_kv.Rows(t_);
  ops_.engram_dequantize({.codes = codes, .scales = scales, .out = values}, launch_);
  Linear(w.wkv, values, kv);
  const TensorView streams = ws_.streams.Rows(t_);
  EngramGateParams gate;
  gate.streams = streams;
  gate.kv = kv;
  gate.weight = w.gate.view();
  gate.eps = c_.rms_norm_eps;
  if (tables_.has_images) gate.image_mask = tables_.image_mask.data();
  gate.out = streams;
  if (Observed()) {
    observed_.resize(static_cast<size_t>(t_ * c_.hc_mult));
    gate.gate = MakeView(observed_.data(), t_, c_.hc_mult);
  }
  ops_.engram_gate(gate, launch_);
  if (!Observed()) return absl::OkStatus();
  observer_->Tensor(absl::StrCat("L", layer, ".engram.gate"), gate.gate);
  observer_->Tensor(absl::StrCat("L", layer, ".engram.S"), streams);
  return absl::OkStatus();
}

// Every rank reads its own columns: its share of the heads of every n-gram order. The raw rows are
// gathered and put back in column order = order * heads + head.
absl::Status Forward::GatherEngramRows(int module_idx,
                                       ConstTensorView& codes,
                                       ConstTensorView& scales) {
  const int64_t start = NowUs();
  const absl::StatusOr<EngramRows> own = rows_->Rows(module_idx);
  engram_wait_us_ += NowUs() - start;
  if (!own.ok()) return own.status();
  const int64_t columns = c_.engram_num_columns();
  const int64_t code_bytes = c_.engram_head_dim;
  const int64_t scale_bytes = c_.engram_head_dim / 32;
  const auto view = [&](const void* data, DType dtype, int64_t width) {
    return ConstTensorView(
        BasicTensorView<const void*>{data, dtype, t_, columns * width, columns * width});
  };
  if (options_.world == 1) {
    codes = view(own->values, DType::kF8E4M3, code_bytes);
    scales = view(own->scales, DType::kF8E8M0, scale_bytes);
    return absl::OkStatus();
  }
  const int64_t world = options_.world;
  const int64_t own_columns = columns / world;
  const int64_t own_heads = c_.engram_num_heads / world;
  const auto gather = [&](const uint8_t* mine, int64_t width, Buffer& to) -> absl::Status {
    const int64_t part = t_ * own_columns * width;
    gathered_rows_.resize(static_cast<size_t>(part * world));
    const int64_t gather_start = NowUs();
    RETURN_IF_ERROR(
        Timed(communicator_->AllGather(std::as_bytes(std::span(mine, static_cast<size_t>(part))),
                                       std::span(gathered_rows_)),
              gather_start));
    const std::byte* from = gathered_rows_.data();
    std::byte* out = to.data<std::byte>();
    for (int64_t rank = 0; rank < world; ++rank)
      for (int64_t t = 0; t < t_; ++t)
        for (int64_t order = 0; order < c_.engram_num_orders(); ++order) {
          const int64_t column = order * c_.engram_num_heads + rank * own_heads;
          const int64_t bytes = own_heads * width;
          std::memcpy(out + (t * columns + column) * width, from, static_cast<size_t>(bytes));
          from += bytes;
        }
    return absl::OkStatus();
  };
  RETURN_IF_ERROR(gather(own->values, code_bytes, ws_.row_codes));
  RETURN_IF_ERROR(gather(own->scales, scale_bytes, ws_.row_scales));
  codes = view(ws_.row_codes.data<std::byte>(), DType::kF8E4M3, code_bytes);
  scales = view(ws_.row_scales.data<std::byte>(), DType::kF8E8M0, scale_bytes);
  return absl::OkStatus();
}

}  // namespace twinspark
