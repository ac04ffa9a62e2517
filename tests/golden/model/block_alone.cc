// Stored inputs of a block (block_alone.h).
#include "tests/golden/model/block_alone.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "kernels/ops/ops.h"
#include "shard_worker/model/forward.h"
#include "shard_worker/model/sequence_state.h"

namespace twinspark::golden {
namespace {

std::string Name(int layer, const char* name) {
  return absl::StrCat("L", layer, ".", name);
}

absl::Status CheckRows(const Values& values, int64_t rows, const std::string& name) {
  if (values.rows == rows) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(name, " has ", values.rows, " rows, ", rows, " expected"));
}

ConstTensorView View(const Values& values) {
  return MakeView(values.data.data(), values.rows, values.cols);
}

void CopyList(const Values& values, TensorView lists, int32_t* counts) {
  for (int64_t r = 0; r < lists.rows; ++r) {
    counts[r] = 0;
    for (int64_t i = 0; r < values.rows && i < values.cols && i < lists.cols; ++i)
      if (values.Row(r)[i] >= 0)
        lists.Row<int32_t>(r)[counts[r]++] = static_cast<int32_t>(values.Row(r)[i]);
  }
}

// Streams entering the block, before its Engram step with `before_engram`. Empty: the embedding.
absl::StatusOr<Values> StreamsInto(GoldenDirectory& directory,
                                   const GoldenCase& c,
                                   const ModelConfig& config,
                                   int layer,
                                   bool before_engram) {
  if (!before_engram) {
    if (c.Find(Name(layer, "S_in")) != nullptr)
      return directory.ReadOptional(c, Name(layer, "S_in"));
    if (config.layers[static_cast<size_t>(layer)].engram_module >= 0)
      return directory.ReadOptional(c, Name(layer, "engram.S"));
  }
  if (layer == 0) return Values();
  return directory.ReadOptional(c, Name(layer - 1, "S_out"));
}

}  // namespace

bool HasBlockInputs(const GoldenCase& c, const ModelConfig& config, int layer) {
  const LayerTopology& t = config.layers[static_cast<size_t>(layer)];
  if (c.kind != "prefill" || (c.level != "full" && c.level != "mid")) return false;
  const bool has_streams =
      c.Find(Name(layer, "S_in")) != nullptr ||
      (t.engram_module >= 0 ? c.Find(Name(layer, "engram.S")) != nullptr
                            : layer == 0 || c.Find(Name(layer - 1, "S_out")) != nullptr);
  if (!has_streams || c.Find(Name(layer, "pre_in")) == nullptr) return false;
  const bool has_groups = static_cast<int64_t>(c.ids.size()) >= t.ratio;
  if (t.ratio == 0 || t.owns_kv || !has_groups) return true;
  return c.Find(Name(t.kv_source, "row")) != nullptr &&
         (t.owns_index || c.Find(Name(t.index_source, "sel")) != nullptr);
}

absl::Status RunBlockAlone(
    GoldenDirectory& directory, const GoldenCase& c, int layer, bool engram_only, Model& model) {
  const ModelConfig& config = model.config();
  const LayerTopology& t = config.layers[static_cast<size_t>(layer)];
  Forward& forward = model.forward();
  const OpTable& ops = CpuOps();
  const int64_t num_rows = static_cast<int64_t>(c.ids.size());
  Segment segment;
  segment.sequence = &model.slots()[0];
  segment.ids = c.ids;
  RETURN_IF_ERROR(forward.Prepare(std::span(&segment, 1), RowClass::kBulk));
  Workspace& ws = forward.workspace();

  ASSIGN_OR_RETURN(const Values streams, StreamsInto(directory, c, config, layer, engram_only));
  forward.Embed(std::span(&segment, 1));
  if (!streams.empty()) {
    RETURN_IF_ERROR(CheckRows(streams, num_rows, "streams"));
    ops.add({.a = View(streams), .b = {}, .out = ws.streams.Rows(num_rows)}, forward.launch());
  }
  if (engram_only) return forward.EngramBlock(layer);

  ASSIGN_OR_RETURN(const Values pre, directory.ReadOptional(c, Name(layer, "pre_in")));
  RETURN_IF_ERROR(CheckRows(pre, num_rows, "pre_in"));
  ops.add({.a = View(pre), .b = {}, .out = ws.pre.Rows(num_rows)}, forward.launch());

  if (t.ratio > 0 && !t.owns_kv) {
    const GroupTable& groups = forward.tables().groups[t.ratio];
    const auto inject = [&](const char* name, const CacheRows& cache) -> absl::Status {
      ASSIGN_OR_RETURN(const Values values, directory.ReadOptional(c, Name(t.kv_source, name)));
      RETURN_IF_ERROR(CheckRows(values, groups.num_groups, name));
      ops.store_rows({.x = View(values), .dst = cache, .index = groups.store_row.data()},
                     forward.launch());
      return absl::OkStatus();
    };
    if (groups.num_groups > 0) {
      RETURN_IF_ERROR(inject("row", forward.cache().rows(t.source_idx)));
      if (t.owns_index) RETURN_IF_ERROR(inject("key", forward.cache().keys(t.source_idx)));
    }
  }
  if (t.ratio > 0 && !t.owns_index) {
    ASSIGN_OR_RETURN(const Values sel, directory.ReadOptional(c, Name(t.index_source, "sel")));
    CopyList(sel, ws.selected.Rows(num_rows), ws.num_selected.data<int32_t>());
  }
  if (t.uses_candidates) {
    ASSIGN_OR_RETURN(const Values cand,
                     directory.ReadOptional(c, Name(config.candidate_source_layer_id, "cand")));
    CopyList(cand, ws.candidates.Rows(num_rows), ws.num_candidates.data<int32_t>());
  }
  return forward.Block(layer);
}

}  // namespace twinspark::golden
