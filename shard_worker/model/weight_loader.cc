// Which tensors a rank takes and how they are cut (weight_loader.h). Reads like the table of model
// specification 2.2 with the split of 5.2 beside each line.
#include "shard_worker/model/weight_loader.h"

#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "shard_worker/model/tensor_reader.h"

namespace twinspark {
namespace {

struct Split {
  int rank = 0;
  int world = 1;
  int num_partials = 1;  // of an in-split matrix on this rank
  bool whole_experts = false;

  Slice Share(int64_t size) const { return Slice::Share(size, rank, world); }
  // Partial p of this rank's share of the inputs.
  Slice Partial(int64_t size, int p) const {
    return Slice::Share(size, rank * num_partials + p, world * num_partials);
  }
};

struct MoeShape {
  int num_experts = 0;
  int num_chosen = 0;
};

class Loader {
 public:
  Loader(TensorReader& reader, const ModelConfig& config, Split split)
      : reader_(reader), c_(config), split_(split) {}

  absl::Status LoadModel(ModelWeights& w) {
    w.num_partials = split_.num_partials;
    ASSIGN_OR_RETURN(w.embed, reader_.Embedding("embed.weight", c_.vocab_size, c_.hidden_size));
    for (int layer = 0; layer < c_.num_layers; ++layer) {
      BlockWeights block;
      const std::string name = absl::StrCat("layers.", layer);
      RETURN_IF_ERROR(LoadBlock(name, {c_.num_experts, c_.experts_per_token}, block));
      RETURN_IF_ERROR(LoadSources(name, c_.layers[static_cast<size_t>(layer)], block));
      w.blocks.push_back(std::move(block));
    }
    ASSIGN_OR_RETURN(w.norm, reader_.Floats("norm.weight", 1, c_.hidden_size));
    const bool is_lm_head = reader_.HasMatrix("lm_head");
    ASSIGN_OR_RETURN(w.head, reader_.Matrix(is_lm_head ? "lm_head" : "head", c_.vocab_size,
                                            c_.hidden_size, split_.Share(c_.vocab_size)));
    // A pack without draft stages (layout P3) serves without drafting.
    if (c_.num_draft_stages > 0 && reader_.HasMatrix("mtp.0.main_proj")) {
      w.draft.emplace();
      RETURN_IF_ERROR(LoadDraft(*w.draft));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status LoadHyperConnection(const std::string& name, HyperConnectionWeights& w) {
    const int64_t mixes = c_.hc_mult * (2 + c_.hc_mult);
    ASSIGN_OR_RETURN(w.fn, reader_.Floats(name + "_fn", mixes,
                                          static_cast<int64_t>(c_.hc_mult) * c_.hidden_size));
    ASSIGN_OR_RETURN(w.base, reader_.Floats(name + "_base", 1, mixes));
    ASSIGN_OR_RETURN(w.scale, reader_.Floats(name + "_scale", 1, 3));
    return absl::OkStatus();
  }

  absl::Status LoadBlock(const std::string& name, MoeShape moe, BlockWeights& w) {
    ASSIGN_OR_RETURN(w.attn_norm, reader_.Floats(name + ".attn_norm.weight", 1, c_.hidden_size));
    ASSIGN_OR_RETURN(w.ffn_norm, reader_.Floats(name + ".ffn_norm.weight", 1, c_.hidden_size));
    RETURN_IF_ERROR(LoadHyperConnection(name + ".hc_attn", w.hc_attn));
    RETURN_IF_ERROR(LoadHyperConnection(name + ".hc_ffn", w.hc_ffn));
    RETURN_IF_ERROR(LoadAttention(name + ".attn", w.attn));
    return LoadMoe(name + ".ffn", moe, w.ffn);
  }

  absl::Status LoadAttention(const std::string& name, AttentionWeights& w) {
    const int64_t d = c_.hidden_size;
    const int64_t q_width = static_cast<int64_t>(c_.num_heads) * c_.head_dim;
    const int64_t o_width = static_cast<int64_t>(c_.o_groups) * c_.o_lora_rank;
    const int64_t group_in = q_width / c_.o_groups;
    ASSIGN_OR_RETURN(w.wq_a, reader_.Matrix(name + ".wq_a", c_.q_lora_rank, d));
    ASSIGN_OR_RETURN(w.q_norm, reader_.Floats(name + ".q_norm.weight", 1, c_.q_lora_rank));
    ASSIGN_OR_RETURN(
        w.wq_b, reader_.Matrix(name + ".wq_b", q_width, c_.q_lora_rank, split_.Share(q_width)));
    ASSIGN_OR_RETURN(w.wkv, reader_.Matrix(name + ".wkv", c_.head_dim, d));
    ASSIGN_OR_RETURN(w.kv_norm, reader_.Floats(name + ".kv_norm.weight", 1, c_.head_dim));
    ASSIGN_OR_RETURN(
        w.sink, reader_.Floats(name + ".attn_sink", 1, c_.num_heads, split_.Share(c_.num_heads)));
    const bool is_sliced = reader_.Has(name + ".wo_a.slice.0.trellis");
    const Slice groups = split_.Share(c_.o_groups);
    for (int64_t g = groups.begin; g < groups.end; ++g) {
      absl::StatusOr<LinearWeights> group =
          is_sliced
              ? reader_.Matrix(absl::StrCat(name, ".wo_a.slice.", g), c_.o_lora_rank, group_in)
              : reader_.Matrix(name + ".wo_a", o_width, group_in,
                               {g * c_.o_lora_rank, (g + 1) * c_.o_lora_rank});
      if (!group.ok()) return group.status();
      w.wo_a.push_back(*std::move(group));
    }
    if (is_sliced)  // the other ranks' groups
      for (int g = 0; g < c_.o_groups; ++g)
        IgnoreMatrix(absl::StrCat(name, ".wo_a.slice.", g));
    for (int p = 0; p < split_.num_partials; ++p) {
      ASSIGN_OR_RETURN(LinearWeights part, reader_.Matrix(name + ".wo_b", d, o_width, Slice::All(),
                                                          split_.Partial(o_width, p)));
      w.wo_b.push_back(std::move(part));
    }
    return absl::OkStatus();
  }

  absl::Status LoadMoe(const std::string& name, MoeShape shape, MoeWeights& w) {
    w.num_chosen = shape.num_chosen;
    ASSIGN_OR_RETURN(w.gate, reader_.Floats(name + ".gate.weight", shape.num_experts,
                                            c_.hidden_size, Slice::All(), Native::kBf16));
    ASSIGN_OR_RETURN(w.bias, reader_.Floats(name + ".gate.bias", 1, shape.num_experts));
    if (reader_.Has(name + ".gate.bias_vl")) {
      ASSIGN_OR_RETURN(w.bias_vl, reader_.Floats(name + ".gate.bias_vl", 1, shape.num_experts));
    }
    const size_t per_expert = static_cast<size_t>(2 + split_.num_partials);
    w.matrices.reserve(per_expert * static_cast<size_t>(shape.num_experts + 1));
    w.experts.resize(static_cast<size_t>(shape.num_experts));
    for (int e = 0; e < shape.num_experts; ++e)
      RETURN_IF_ERROR(
          LoadExpert(absl::StrCat(name, ".experts.", e), w, w.experts[static_cast<size_t>(e)]));
    return LoadExpert(name + ".shared_experts", w, w.shared);
  }

  Slice ExpertShare(int64_t inner) const {
    return split_.whole_experts ? Slice::All() : split_.Share(inner);
  }
  Slice ExpertPartial(int64_t inner, int p) const {
    return split_.whole_experts ? Slice::All() : split_.Partial(inner, p);
  }

  absl::Status LoadExpert(const std::string& name, MoeWeights& w, ExpertWeights& expert) {
    const int64_t inner = c_.moe_intermediate_size;
    const auto keep = [&w](LinearWeights weights) {
      w.matrices.push_back(std::move(weights));
      return &w.matrices.back();
    };
    ASSIGN_OR_RETURN(LinearWeights gate,
                     reader_.Matrix(name + ".w1", inner, c_.hidden_size, ExpertShare(inner)));
    expert.gate = keep(std::move(gate));
    ASSIGN_OR_RETURN(LinearWeights up,
                     reader_.Matrix(name + ".w3", inner, c_.hidden_size, ExpertShare(inner)));
    expert.up = keep(std::move(up));
    for (int p = 0; p < split_.num_partials; ++p) {
      ASSIGN_OR_RETURN(LinearWeights down, reader_.Matrix(name + ".w2", c_.hidden_size, inner,
                                                          Slice::All(), ExpertPartial(inner, p)));
      expert.down[p] = keep(std::move(down));
    }
    return absl::OkStatus();
  }

  // What only some backbone blocks have: compressor, indexer, Engram.
  absl::Status LoadSources(const std::string& name, const LayerTopology& t, BlockWeights& w) {
    const int64_t d = c_.hidden_size;
    const std::string attn = name + ".attn";
    if (t.owns_kv) {
      CompressorWeights& k = w.compressor.emplace();
      ASSIGN_OR_RETURN(k.wkv, reader_.Matrix(attn + ".compressor.wkv", c_.head_dim, d));
      if (t.ratio > 1) {
        ASSIGN_OR_RETURN(k.wgate, reader_.Matrix(attn + ".compressor.wgate", c_.head_dim, d));
      }
      ASSIGN_OR_RETURN(k.norm, reader_.Floats(attn + ".compressor.norm.weight", 1, c_.head_dim));
      ASSIGN_OR_RETURN(k.wk, reader_.Matrix(attn + ".indexer.wk", c_.index_head_dim, c_.head_dim));
      ASSIGN_OR_RETURN(k.k_norm,
                       reader_.Floats(attn + ".indexer.k_norm.weight", 1, c_.index_head_dim));
    }
    if (t.owns_index) {
      IndexerWeights& i = w.indexer.emplace();
      ASSIGN_OR_RETURN(i.wq_b,
                       reader_.Matrix(attn + ".indexer.wq_b",
                                      static_cast<int64_t>(c_.index_num_heads) * c_.index_head_dim,
                                      c_.q_lora_rank));
      ASSIGN_OR_RETURN(i.weights_proj,
                       reader_.Matrix(attn + ".indexer.weights_proj", c_.index_num_heads, d));
    }
    if (t.engram_module >= 0) {
      EngramWeights& e = w.engram.emplace();
      ASSIGN_OR_RETURN(e.wkv, reader_.Matrix(name + ".engram.wkv", (c_.hc_mult + 1) * d,
                                             static_cast<int64_t>(c_.engram_num_columns()) *
                                                 c_.engram_head_dim));
      ASSIGN_OR_RETURN(e.gate, reader_.Floats(name + ".engram.q_weight", c_.hc_mult, d,
                                              Slice::All(), Native::kBf16));
      ASSIGN_OR_RETURN(const FloatTensor key, reader_.Floats(name + ".engram.k_weight", c_.hc_mult,
                                                             d, Slice::All(), Native::kBf16));
      for (size_t j = 0; j < key.values.size(); ++j)
        e.gate.values[j] *= key.values[j];
      // The tables themselves stay with the row service.
      reader_.Ignore(name + ".engram.embed.weight");
      reader_.Ignore(name + ".engram.embed.scale");
    }
    return absl::OkStatus();
  }

  absl::Status LoadDraft(DraftWeights& w) {
    const int64_t d = c_.hidden_size;
    const int64_t taps = static_cast<int64_t>(c_.draft_target_layer_ids.size());
    const std::string last = absl::StrCat("mtp.", c_.num_draft_stages - 1);
    ASSIGN_OR_RETURN(w.main_proj, reader_.Matrix("mtp.0.main_proj", d, taps * d));
    ASSIGN_OR_RETURN(w.main_norm, reader_.Floats("mtp.0.main_norm.weight", 1, d));
    for (int stage = 0; stage < c_.num_draft_stages; ++stage) {
      BlockWeights block;
      RETURN_IF_ERROR(LoadBlock(absl::StrCat("mtp.", stage),
                                {c_.draft_num_experts, c_.draft_experts_per_token}, block));
      w.stages.push_back(std::move(block));
    }
    ASSIGN_OR_RETURN(w.norm, reader_.Floats(last + ".norm.weight", 1, d));
    ASSIGN_OR_RETURN(w.markov_embed, reader_.Embedding(last + ".markov_head.embed.weight",
                                                       c_.vocab_size, c_.draft_markov_rank));
    ASSIGN_OR_RETURN(w.markov_head, reader_.Matrix(last + ".markov_head.head", c_.vocab_size,
                                                   c_.draft_markov_rank));
    ASSIGN_OR_RETURN(w.confidence_proj,
                     reader_.Matrix(last + ".confidence_head.proj", 1, d + c_.draft_markov_rank));
    return absl::OkStatus();
  }

  void IgnoreMatrix(const std::string& name) {
    for (const char* suffix : {".trellis", ".suh", ".svh", ".su", ".sv", ".mul1", ".mcg"})
      reader_.Ignore(name + suffix);
  }

  TensorReader& reader_;
  const ModelConfig& c_;
  const Split split_;
};

// Tensors that a checkpoint may hold and this program does not read.
bool IsKnownElsewhere(const std::string& name) {
  return absl::StartsWith(name, "vision.") || absl::StartsWith(name, "aligner.") ||
         name == "image_start" || name == "image_end" || name == "image_newline" ||
         absl::EndsWith(name, ".attn.compressor.ape");
}

}  // namespace

int NumPartials(const ModelConfig& config, int world) {
  return world == 1 && CheckTensorParallel(config, 2).ok() ? 2 : 1;
}

absl::StatusOr<LoadedWeights> LoadWeights(const Checkpoint& checkpoint,
                                          const ModelConfig& config,
                                          const ModelOptions& options,
                                          const LoadProgressCallback& progress) {
  RETURN_IF_ERROR(CheckTensorParallel(config, options.world));
  const Exl3Load exl3_load = options.reference.bf16_weights ? Exl3Load::kBf16
                             : options.f16_copy             ? Exl3Load::kF16
                                                            : Exl3Load::kTrellis;
  TensorReader reader(checkpoint, exl3_load, progress);
  LoadedWeights loaded;
  const int num_partials = options.reference.one_sum ? 1 : NumPartials(config, options.world);
  const Split split{options.rank, options.world, num_partials, options.reference.whole_experts};
  RETURN_IF_ERROR(Loader(reader, config, split).LoadModel(loaded.weights));
  for (const std::string& name : checkpoint.names())
    if (IsKnownElsewhere(name)) reader.Ignore(name);
  if (const std::string unknown = reader.FirstUnused(); !unknown.empty())
    return absl::InvalidArgumentError(
        absl::StrCat(checkpoint.dir(), ": tensor ", unknown,
                     " is unknown: this program would compute without it; check that config.json "
                     "and the shards belong together"));
  loaded.weights.bytes = reader.resident_bytes();
  loaded.replicated_digest = reader.replicated_digest();
  loaded.slices_digest = reader.slices_digest();
  return loaded;
}

}  // namespace twinspark
