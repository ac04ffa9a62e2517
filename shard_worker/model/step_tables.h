// Per-row integers of a forward pass, the same for every layer, so computed once per step:
// positions, which keys a row sees, where its window row and carry go, which groups of tokens
// complete. Source: model specification 4.3 and dspark specification 2.5. Written by Build (host
// code), read by ops.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "common/model_config.h"
#include "kernels/attention/attention.h"
#include "kernels/indexer/index_select.h"
#include "shard_worker/model/kv_cache.h"
#include "shard_worker/model/sequence_state.h"

namespace twinspark {

// Consecutive positions of one sequence within a step.
struct Segment {
  int slot = 0;
  const SequenceState* sequence = nullptr;
  int64_t first_position = 0;
  std::span<const int32_t> ids;  // num_rows of them
  int64_t logits_rows = 0;       // the last so many rows get logits
  int64_t row_begin = 0;         // filled by Build

  int64_t num_rows() const { return static_cast<int64_t>(ids.size()); }
};

// Groups of `ratio` tokens that complete in this step (model specification 3.5).
struct GroupTable {
  int ratio = 1;
  int64_t num_groups = 0;
  std::vector<int64_t> positions;  // of the group's first token
  std::vector<int64_t> sources;    // [num_groups * ratio], see CompressPoolParams
  std::vector<int64_t> store_row;  // row of the paged caches
};

struct StepTables {
  StepTables(const ModelConfig& config, int64_t max_rows);

  void Build(std::span<Segment> segments, const KvCache& cache);
  // The block rows of a draft pass: `block` rows per sequence from `first_position` on, all of them
  // and the last committed rows visible to each.
  void BuildDraft(std::span<const Segment> segments, const KvCache& cache);

  int64_t num_rows = 0;
  int64_t num_logits_rows = 0;
  // (first row, count) of the rows that get logits.
  std::vector<std::pair<int64_t, int64_t>> logits_ranges;
  std::vector<int32_t> ids;
  std::vector<int64_t> positions;
  std::vector<uint8_t> image_mask;
  bool has_images = false;
  std::vector<AttentionRow> attention;
  std::vector<IndexRow> index[3];  // by ratio
  std::vector<int64_t> ring_row;   // where the window row goes, -1 = overwritten in this step
  std::vector<int64_t> carry_row;
  std::vector<int64_t> draft_row;  // where the draft context row goes, -1 = never needed
  GroupTable groups[3];            // by ratio

 private:
  void AddGroups(const Segment& segment, GroupTable& table);

  const ModelConfig& c_;
};

}  // namespace twinspark
