// The network, once, in the order of model specification 3.1 to 3.13: forward.cc from the embedding
// to the head, attention_layer.cc 3.4 to 3.9, engram_layer.cc 3.11, draft_head.cc 3.13. Runs on
// whatever filled the op table; every number comes from the config. One object per model; it owns
// the activation buffers of a step and borrows the rest. Step thread only. Called by Model
// (model.cc); golden programs also call single blocks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "common/model_config.h"
#include "kernels/arena.h"
#include "kernels/launch.h"
#include "kernels/ops/ops.h"
#include "shard_worker/model/forward_observer.h"
#include "shard_worker/model/kv_cache.h"
#include "shard_worker/model/model.h"
#include "shard_worker/model/row_source.h"
#include "shard_worker/model/shared_trace.h"
#include "shard_worker/model/step_tables.h"
#include "shard_worker/model/weights.h"
#include "shard_worker/model/workspace.h"
#include "shard_worker/parallel/communicator.h"

namespace twinspark {

// The next drafts of one sequence: anchor = the id at `position`, which is not processed yet.
struct DraftRequest {
  int slot = 0;
  const SequenceState* sequence = nullptr;
  int64_t position = 0;
  int32_t anchor = 0;
};

class Forward {
 public:
  Forward(const ModelConfig& config,
          const ModelWeights& weights,
          const ModelOptions& options,
          const StepBounds& bounds,
          const OpTable& ops,
          KvCache& cache,
          ThreadPool& pool);

  void BeginEpoch(Communicator* communicator, RowSource* rows) {
    communicator_ = communicator;
    rows_ = rows;
  }
  void SetObserver(ForwardObserver* observer) { observer_ = observer; }
  // Asked before every layer of a pass with the number of layers done; an error ends the step. Null
  // = off.
  using LayerHook = std::function<absl::Status(int layers_done)>;
  void SetLayerHook(LayerHook hook) { layer_hook_ = std::move(hook); }

  // All layers for all rows of the segments, logits for those that want them, draft context rows.
  // Row order = segment order. Writes caches at the rows' absolute positions only.
  // `next` are rows that a later Run will probably be about: a hint to the row source, given as
  // soon as the rows of this one have been asked for.
  absl::Status Run(std::span<Segment> segments,
                   RowClass row_class,
                   std::span<const Segment> next = {});
  // The same hint outside of Run.
  void HintRows(std::span<const Segment> next, RowClass row_class);

  // Results of the last Run.
  ConstTensorView streams();  // [rows, C * d]: the final residual streams
  ConstTensorView logits();   // [logits rows, vocab], f32
  // Logits of `count` more rows of the last Run, at most StepBounds::logits_rows, in the place of
  // what logits() showed. With several ranks all of them must ask.
  absl::StatusOr<ConstTensorView> LogitsOfRows(int64_t first, int64_t count);

  // One draft pass. drafts[i * block + k] and confidences (raw logits) of request i.
  absl::Status Draft(std::span<const DraftRequest> requests,
                     std::span<int32_t> drafts,
                     std::span<float> confidences);

  // Pieces of Run, for tests of single blocks: Prepare, then set streams and pre, then Block.
  absl::Status Prepare(std::span<Segment> segments, RowClass row_class);
  void Embed(std::span<const Segment> segments);
  absl::Status EngramBlock(int layer);
  absl::Status Block(int layer);
  Workspace& workspace() { return ws_; }
  StepTables& tables() { return tables_; }

  const Launch& launch() const { return launch_; }
  const KvCache& cache() const { return cache_; }
  // Hash of what all ranks have in common; Model resets it per step and turns it off for one rank.
  SharedTrace& trace() { return trace_; }
  const ModelWeights& weights() const { return w_; }
  KvCache& cache() { return cache_; }
  int64_t bytes() const { return ws_.bytes() + static_cast<int64_t>(arena_.capacity_bytes()); }
  int64_t engram_wait_us() const { return engram_wait_us_; }
  int64_t collectives_us() const { return collectives_us_; }
  void ResetTimings() { engram_wait_us_ = collectives_us_ = 0; }

 private:
  // One block in its place: a backbone layer or a draft stage.
  struct Place {
    char kind = 'L';  // 'M' for draft stages: the prefix of observed names
    int index = 0;
    const BlockWeights* weights = nullptr;
    const LayerTopology* topology = nullptr;  // null for draft stages
    CacheRows ring;
    ConstTensorView rope;   // this layer's table, one row per row of the step
    bool keep_rows = true;  // window rows go to the ring; a draft block's are forgotten
  };

  Place BackbonePlace(int layer);
  Place DraftPlace(int stage);

  void EmbedIds();
  void OverwriteEmbeddings(std::span<const Segment> segments);
  absl::Status RunBlock(const Place& place);
  absl::Status Attention(const Place& place);
  void Compress(const Place& place);
  void SelectRows(const Place& place);
  void SparseAttend(const Place& place);
  absl::Status OutputProjection(const Place& place);
  absl::Status Experts(const Place& place);
  absl::Status SumPartials(TensorView out, bool over_ranks);
  absl::Status GatherEngramRows(int module_idx, ConstTensorView& codes, ConstTensorView& scales);
  absl::Status Head();
  void FinalNorm(int64_t first, int64_t count, int64_t to);
  absl::Status Logits(int64_t num_rows);
  void DraftContext();
  void MarkovChain(std::span<const DraftRequest> requests,
                   std::span<int32_t> drafts,
                   std::span<float> confidences);

  void Linear(const LinearWeights& weights, ConstTensorView x, TensorView y);
  void Linears(std::span<const LinearParams> jobs);
  void Norm(const FloatTensor& weight, TensorView x);
  void Rope(TensorView x, int head_dim, ConstTensorView table, bool inverse);
  CacheRows StepRows();
  bool Observed() const { return observer_ != nullptr; }
  void Show(const Place& place, std::string_view name, const ConstTensorView& value);
  void ShowCacheRows(const Place& place,
                     std::string_view name,
                     const CacheRows& rows,
                     const int64_t* index,
                     int64_t count);
  static int64_t NowUs();
  absl::Status Timed(absl::Status status, int64_t start_us);

  const ModelConfig& c_;
  const ModelWeights& w_;
  const ModelOptions& options_;
  const OpTable& ops_;
  KvCache& cache_;
  const bool is_exact_;  // f32 numerics
  Workspace ws_;
  StepTables tables_;
  Arena arena_;
  Launch launch_;
  std::vector<float> plain_frequencies_;
  std::vector<float> compress_frequencies_;
  int64_t t_ = 0;  // rows of the pass in progress
  Communicator* communicator_ = nullptr;
  RowSource* rows_ = nullptr;
  ForwardObserver* observer_ = nullptr;
  LayerHook layer_hook_;
  SharedTrace trace_;
  void FillRowRanges(std::span<const Segment> segments);

  std::vector<RowRange> row_ranges_;
  std::vector<uint8_t> dead_;
  std::vector<std::byte> gathered_rows_;
  std::vector<float> observed_;  // conversion and score buffer for the observer
  int64_t engram_wait_us_ = 0;
  int64_t collectives_us_ = 0;
};

}  // namespace twinspark
