// Parses config.json and derives the topology (model_config.h).
#include "common/model_config.h"

#include <algorithm>
#include <cmath>
#include <span>
#include <string>

#include <boost/json.hpp>

#include "absl/strings/str_cat.h"

#include "common/file_util.h"
#include "common/status_macros.h"
#include "common/string_view.h"
#include "common/unique_keys.h"

namespace twinspark {
namespace {

constexpr size_t kMaxConfigBytes = 4 << 20;

// Reads keys of one JSON object; the first error sticks, so that a parser reads as a list of keys.
class Reader {
 public:
  Reader(const boost::json::object& object, std::string_view origin, std::string_view path)
      : object_(object), origin_(origin), path_(path) {}

  const absl::Status& status() const { return status_; }

  void Error(std::string_view key, std::string_view found, std::string_view expected) {
    if (!status_.ok()) return;
    status_ = absl::InvalidArgumentError(absl::StrCat(ToAbsl(origin_), ": ", ToAbsl(path_),
                                                      ToAbsl(key), " is ", ToAbsl(found),
                                                      ", expected ", ToAbsl(expected)));
  }

  bool Has(const char* key) const {
    const boost::json::value* value = object_.if_contains(key);
    return value != nullptr && !value->is_null();
  }

  template <class T>
  void Int(const char* key, T& out, int64_t min, int64_t max) {
    const boost::json::value* value = Require(key);
    if (value == nullptr) return;
    out = static_cast<T>(ToInt(key, *value, min, max));
  }

  template <class T>
  void OptionalInt(const char* key, T& out, int64_t min, int64_t max) {
    if (Has(key)) Int(key, out, min, max);
  }

  template <class T>
  void Number(const char* key, T& out, double min, double max) {
    const boost::json::value* value = Require(key);
    if (value == nullptr) return;
    boost::system::error_code error;
    const double number = value->to_number<double>(error);
    if (error || !std::isfinite(number) || number < min || number > max) {
      Error(key, Text(*value), absl::StrCat("a number in ", min, "..", max));
      return;
    }
    out = static_cast<T>(number);
  }

  template <class T>
  void IntList(const char* key, std::vector<T>& out, size_t max_size, int64_t min, int64_t max) {
    const boost::json::value* value = Require(key);
    if (value == nullptr) return;
    if (!value->is_array() || value->get_array().size() > max_size) {
      Error(key, Text(*value), absl::StrCat("a list of at most ", max_size, " numbers"));
      return;
    }
    out.clear();
    for (const boost::json::value& entry : value->get_array())
      out.push_back(static_cast<T>(ToInt(key, entry, min, max)));
  }

  // Refuses a key that is there with another value: it would change the mathematics.
  void MustBe(const char* key, const boost::json::value& expected) {
    const boost::json::value* value = object_.if_contains(key);
    if (value == nullptr || value->is_null()) return;
    const bool same = value->is_number() && expected.is_number()
                          ? value->to_number<double>() == expected.to_number<double>()
                          : *value == expected;
    if (!same)
      Error(key, Text(*value), absl::StrCat(Text(expected), " (all this program computes)"));
  }

  const boost::json::object* Object(const char* key) {
    const boost::json::value* value = Require(key);
    if (value == nullptr) return nullptr;
    if (!value->is_object()) {
      Error(key, Text(*value), "an object");
      return nullptr;
    }
    return &value->get_object();
  }

  // Every key must be in the list: an unknown key may change the mathematics.
  void Only(std::span<const std::string_view> known) {
    for (const auto& [key, value] : object_) {
      const std::string_view name(key.data(), key.size());
      if (std::find(known.begin(), known.end(), name) == known.end())
        Error(name, Text(value), "no such key (this program does not know it)");
    }
  }

 private:
  static std::string Text(const boost::json::value& value) {
    std::string text = boost::json::serialize(value);
    if (text.size() > 120) text = text.substr(0, 117) + "...";
    return text;
  }

  const boost::json::value* Require(const char* key) {
    const boost::json::value* value = object_.if_contains(key);
    if (value == nullptr) Error(key, "missing", "a value");
    return value;
  }

  int64_t ToInt(const char* key, const boost::json::value& value, int64_t min, int64_t max) {
    boost::system::error_code error;
    const int64_t number = value.to_number<int64_t>(error);
    if (error || number < min || number > max) {
      Error(key, Text(value), absl::StrCat("a whole number in ", min, "..", max));
      return min;
    }
    return number;
  }

  const boost::json::object& object_;
  std::string_view origin_;
  std::string_view path_;
  absl::Status status_;
};

constexpr int64_t kMaxDim = 1 << 20;

constexpr std::string_view kRopeKeys[] = {
    "rope_type", "type",           "factor",
    "beta_fast", "beta_slow",      "original_max_position_embeddings",
    "mscale",    "mscale_all_dim", "attention_factor",
    "truncate",  "rope_theta"};

absl::Status ParseRope(const boost::json::object& text, std::string_view origin, ModelConfig& c) {
  Reader top(text, origin, "text_config.");
  top.Number("rope_theta", c.rope_theta, 1, 1e12);
  top.Number("compress_rope_theta", c.compress_rope_theta, 1, 1e12);
  const boost::json::object* scaling = top.Object("rope_scaling");
  RETURN_IF_ERROR(top.status());
  Reader rope(*scaling, origin, "text_config.rope_scaling.");
  rope.Only(kRopeKeys);
  rope.MustBe("rope_type", "yarn");
  rope.MustBe("type", "yarn");
  rope.MustBe("attention_factor", 1);
  rope.MustBe("truncate", true);
  rope.Number("factor", c.yarn_factor, 1, 1e6);
  rope.Number("beta_fast", c.yarn_beta_fast, 1e-3, 1e6);
  rope.Number("beta_slow", c.yarn_beta_slow, 1e-3, 1e6);
  rope.Int("original_max_position_embeddings", c.yarn_original_max_position, 1, 1 << 30);
  return rope.status();
}

void ParseEngram(Reader& r, ModelConfig& c) {
  r.IntList("engram_layer_ids", c.engram_layer_ids, 64, 0, c.num_layers - 1);
  r.IntList("engram_num_embeddings", c.engram_num_embeddings, 64, 1, int64_t{1} << 31);
  r.Int("engram_max_ngram_size", c.engram_max_ngram_size, 2, 4);
  r.Int("engram_vocab_size", c.engram_vocab_size, 2, int64_t{1} << 31);
  r.Int("engram_n_heads", c.engram_num_heads, 1, 64);
  r.Int("engram_head_dim", c.engram_head_dim, 32, 4096);
  r.Int(r.Has("engram_pad_token_id") ? "engram_pad_token_id" : "engram_pad_id",
        c.engram_pad_token_id, 0, c.vocab_size - 1);
  r.Int("engram_compressed_vocab_size", c.engram_compressed_vocab_size, 1, c.vocab_size);
}

void ParseDrafts(Reader& r, ModelConfig& c) {
  r.Int("num_nextn_predict_layers", c.num_draft_stages, 0, 16);
  if (c.num_draft_stages == 0) return;
  r.Int("dspark_block_size", c.draft_block_size, 1, 16);
  r.Int("dspark_noise_token_id", c.draft_noise_token_id, 0, c.vocab_size - 1);
  r.IntList("dspark_target_layer_ids", c.draft_target_layer_ids, 16, 0, c.num_layers - 1);
  r.Int("dspark_markov_rank", c.draft_markov_rank, 1, kMaxDim);
  r.Int("dspark_n_routed_experts", c.draft_num_experts, 1, 4096);
  r.Int("dspark_num_experts_per_tok", c.draft_experts_per_token, 1, c.draft_num_experts);
}

void ParseShape(Reader& r, ModelConfig& c) {
  r.Int("vocab_size", c.vocab_size, 2, 1 << 24);
  r.Int("hidden_size", c.hidden_size, 32, kMaxDim);
  r.Int("moe_intermediate_size", c.moe_intermediate_size, 1, kMaxDim);
  r.Int("num_hidden_layers", c.num_layers, 1, 1024);
  r.Int("num_attention_heads", c.num_heads, 1, 4096);
  r.Int("head_dim", c.head_dim, 32, 4096);
  r.Int("qk_rope_head_dim", c.rope_dim, 2, c.head_dim);
  r.Int("q_lora_rank", c.q_lora_rank, 1, kMaxDim);
  r.Int("o_lora_rank", c.o_lora_rank, 1, kMaxDim);
  r.Int("o_groups", c.o_groups, 1, 4096);
  r.Number("swiglu_limit", c.swiglu_limit, 1e-6, 1e30);
  r.Number("rms_norm_eps", c.rms_norm_eps, 0, 1);
  r.Int("max_position_embeddings", c.max_position_embeddings, 1, int64_t{1} << 30);
  r.Int("n_routed_experts", c.num_experts, 1, 4096);
  r.Int("num_experts_per_tok", c.experts_per_token, 1, c.num_experts);
  r.Number("routed_scaling_factor", c.routed_scaling_factor, 0, 1e6);
  r.Int("sliding_window", c.sliding_window, 1, 1 << 16);
  r.IntList("compress_ratios", c.compress_ratios, 2048, 0, 2);
  r.IntList("kv_source_layer_ids", c.kv_source_layer_ids, 1024, 0, c.num_layers - 1);
  r.IntList("index_source_layer_ids", c.index_source_layer_ids, 1024, 0, c.num_layers - 1);
  r.Int("index_n_heads", c.index_num_heads, 1, 4096);
  r.Int("index_head_dim", c.index_head_dim, 32, 4096);
  r.Int("index_topk", c.index_topk, 1, 1 << 20);
  r.Int("candidate_source_layer_id", c.candidate_source_layer_id, -1, c.num_layers - 1);
  if (c.has_candidates()) {
    r.Int("candidate_topk_blocks", c.candidate_topk_blocks, 1, 1 << 20);
    r.Int("candidate_block_size", c.candidate_block_size, 1, 1 << 16);
  }
  r.Int("hc_mult", c.hc_mult, 1, 16);
  r.Int("hc_sinkhorn_iters", c.hc_sinkhorn_iters, 1, 1000);
  r.Number("hc_eps", c.hc_eps, 0, 1);
}

// Every key of text_config that this program knows, read or without effect on the mathematics.
constexpr std::string_view kTextKeys[] = {"model_type",
                                          "vocab_size",
                                          "hidden_size",
                                          "moe_intermediate_size",
                                          "num_hidden_layers",
                                          "num_attention_heads",
                                          "num_key_value_heads",
                                          "head_dim",
                                          "qk_rope_head_dim",
                                          "q_lora_rank",
                                          "o_lora_rank",
                                          "o_groups",
                                          "hidden_act",
                                          "swiglu_limit",
                                          "rms_norm_eps",
                                          "attention_bias",
                                          "attention_dropout",
                                          "initializer_range",
                                          "use_cache",
                                          "tie_word_embeddings",
                                          "max_position_embeddings",
                                          "rope_theta",
                                          "rope_scaling",
                                          "compress_rope_theta",
                                          "n_routed_experts",
                                          "n_shared_experts",
                                          "num_experts_per_tok",
                                          "scoring_func",
                                          "topk_method",
                                          "norm_topk_prob",
                                          "routed_scaling_factor",
                                          "gate_temp",
                                          "sliding_window",
                                          "compress_ratios",
                                          "kv_source_layer_ids",
                                          "index_source_layer_ids",
                                          "index_n_heads",
                                          "index_head_dim",
                                          "index_topk",
                                          "candidate_source_layer_id",
                                          "candidate_topk_blocks",
                                          "candidate_block_size",
                                          "hc_mult",
                                          "hc_sinkhorn_iters",
                                          "hc_eps",
                                          "engram_layer_ids",
                                          "engram_num_embeddings",
                                          "engram_max_ngram_size",
                                          "engram_vocab_size",
                                          "engram_n_heads",
                                          "engram_head_dim",
                                          "engram_pad_token_id",
                                          "engram_pad_id",
                                          "engram_compressed_vocab_size",
                                          "num_nextn_predict_layers",
                                          "dspark_block_size",
                                          "dspark_noise_token_id",
                                          "dspark_target_layer_ids",
                                          "dspark_markov_rank",
                                          "dspark_n_routed_experts",
                                          "dspark_num_experts_per_tok",
                                          "dtype",
                                          "torch_dtype",
                                          "bos_token_id",
                                          "eos_token_id",
                                          "pad_token_id",
                                          "image_token_id",
                                          "transformers_version",
                                          "architectures"};

// Keys whose other values would be another network.
void CheckFixed(Reader& r) {
  r.Only(kTextKeys);
  r.MustBe("model_type", "deepseek_v41_text");
  r.MustBe("num_key_value_heads", 1);
  r.MustBe("hidden_act", "silu");
  r.MustBe("attention_bias", false);
  r.MustBe("tie_word_embeddings", false);
  r.MustBe("n_shared_experts", 1);
  r.MustBe("scoring_func", "sqrtsoftplus");
  r.MustBe("topk_method", "noaux_tc");
  r.MustBe("norm_topk_prob", true);
  r.MustBe("gate_temp", 1);
}

absl::Status Expect(bool holds, std::string_view origin, const std::string& what) {
  if (holds) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(ToAbsl(origin), ": ", what));
}

int LatestSource(const std::vector<int>& sources, int layer) {
  int latest = -1;
  for (int source : sources)
    if (source <= layer) latest = std::max(latest, source);
  return latest;
}

int IndexOf(const std::vector<int>& list, int value) {
  const auto it = std::find(list.begin(), list.end(), value);
  return it == list.end() ? -1 : static_cast<int>(it - list.begin());
}

bool Ascending(const std::vector<int>& list) {
  return std::adjacent_find(list.begin(), list.end(), std::greater_equal<>()) == list.end();
}

// Model specification 1.5 and the load-time checks there.
absl::Status DeriveTopology(std::string_view origin, ModelConfig& c) {
  RETURN_IF_ERROR(Expect(
      static_cast<int>(c.compress_ratios.size()) == c.num_layers + c.num_draft_stages, origin,
      absl::StrCat("compress_ratios has ", c.compress_ratios.size(), " entries, expected ",
                   c.num_layers, " + ", c.num_draft_stages)));
  RETURN_IF_ERROR(Expect(Ascending(c.kv_source_layer_ids) && Ascending(c.index_source_layer_ids) &&
                             Ascending(c.engram_layer_ids),
                         origin, "source and engram layer ids must ascend"));
  for (int source : c.kv_source_layer_ids)
    RETURN_IF_ERROR(Expect(IndexOf(c.index_source_layer_ids, source) >= 0, origin,
                           absl::StrCat("kv source ", source, " is not an index source")));
  RETURN_IF_ERROR(Expect(
      !c.has_candidates() || IndexOf(c.index_source_layer_ids, c.candidate_source_layer_id) >= 0,
      origin,
      absl::StrCat("candidate_source_layer_id ", c.candidate_source_layer_id,
                   " is not an index source")));
  c.layers.assign(static_cast<size_t>(c.num_layers), {});
  for (int layer = 0; layer < c.num_layers; ++layer) {
    LayerTopology& t = c.layers[static_cast<size_t>(layer)];
    t.ratio = c.compress_ratios[static_cast<size_t>(layer)];
    t.owns_kv = IndexOf(c.kv_source_layer_ids, layer) >= 0;
    t.owns_index = IndexOf(c.index_source_layer_ids, layer) >= 0;
    t.engram_module = IndexOf(c.engram_layer_ids, layer);
    t.draft_tap = IndexOf(c.draft_target_layer_ids, layer);
    RETURN_IF_ERROR(Expect(t.ratio > 0 || (!t.owns_kv && !t.owns_index), origin,
                           absl::StrCat("layer ", layer, " is a source but has ratio 0")));
    if (t.ratio == 0) continue;
    t.kv_source = LatestSource(c.kv_source_layer_ids, layer);
    t.index_source = LatestSource(c.index_source_layer_ids, layer);
    RETURN_IF_ERROR(Expect(
        t.kv_source >= 0 && t.index_source >= 0, origin,
        absl::StrCat("layer ", layer, " has ratio ", t.ratio, " but no source at or below it")));
    t.source_idx = IndexOf(c.kv_source_layer_ids, t.kv_source);
    RETURN_IF_ERROR(Expect(
        c.compress_ratios[static_cast<size_t>(t.kv_source)] == t.ratio, origin,
        absl::StrCat("layer ", layer, " has ratio ", t.ratio, ", its kv source ", t.kv_source,
                     " has ", c.compress_ratios[static_cast<size_t>(t.kv_source)])));
    t.makes_candidates = c.has_candidates() && layer == c.candidate_source_layer_id;
    t.uses_candidates = t.owns_index && c.has_candidates() && c.candidate_source_layer_id < layer;
    RETURN_IF_ERROR(
        Expect(!t.uses_candidates ||
                   LatestSource(c.kv_source_layer_ids, c.candidate_source_layer_id) == t.kv_source,
               origin,
               absl::StrCat("layer ", layer, " would mask rows of kv source ", t.kv_source,
                            " with candidates of another")));
  }
  for (int stage = 0; stage < c.num_draft_stages; ++stage)
    RETURN_IF_ERROR(Expect(c.compress_ratios[static_cast<size_t>(c.num_layers + stage)] == 0,
                           origin, "the compress_ratios of the draft stages must be 0"));
  return absl::OkStatus();
}

absl::Status CheckShape(std::string_view origin, const ModelConfig& c) {
  const auto multiple = [&](std::string_view key, int64_t value, int64_t of) {
    return Expect(value % of == 0, origin,
                  absl::StrCat(ToAbsl(key), " is ", value, ", expected a multiple of ", of));
  };
  RETURN_IF_ERROR(multiple("head_dim", c.head_dim, 32));
  RETURN_IF_ERROR(multiple("index_head_dim", c.index_head_dim, 32));
  RETURN_IF_ERROR(multiple("engram_head_dim", c.engram_head_dim, 32));
  RETURN_IF_ERROR(multiple("qk_rope_head_dim", c.rope_dim, 2));
  RETURN_IF_ERROR(multiple("num_attention_heads", c.num_heads, c.o_groups));
  RETURN_IF_ERROR(Expect(
      c.rope_dim <= c.index_head_dim, origin,
      absl::StrCat("qk_rope_head_dim ", c.rope_dim, " exceeds index_head_dim ", c.index_head_dim)));
  RETURN_IF_ERROR(
      Expect(c.engram_layer_ids.size() == c.engram_num_embeddings.size(), origin,
             absl::StrCat("engram_num_embeddings has ", c.engram_num_embeddings.size(),
                          " entries for ", c.engram_layer_ids.size(), " engram_layer_ids")));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ModelConfig> ParseModelConfig(std::string_view json, std::string_view origin) {
  boost::system::error_code error;
  const boost::json::value root = boost::json::parse({json.data(), json.size()}, error);
  if (error || !root.is_object())
    return absl::InvalidArgumentError(
        absl::StrCat(ToAbsl(origin), ": not a JSON object: ", error.message()));
  RETURN_IF_ERROR(CheckUniqueKeys(json, origin));
  ModelConfig c;
  Reader top(root.get_object(), origin, "");
  top.MustBe("model_type", "deepseek_v41");
  top.OptionalInt("bos_token_id", c.bos_token_id, 0, 1 << 24);
  top.OptionalInt("eos_token_id", c.eos_token_id, 0, 1 << 24);
  top.OptionalInt("pad_token_id", c.pad_token_id, 0, 1 << 24);
  top.OptionalInt("image_token_id", c.image_token_id, 0, 1 << 24);
  if (top.Has("virtual_heads_from"))
    top.Error("virtual_heads_from", "set", "none (the config is padded for another split)");
  if (const boost::json::value* quant = root.get_object().if_contains("quantization_config");
      quant != nullptr && quant->is_object()) {
    if (const boost::json::value* method = quant->get_object().if_contains("quant_method");
        method != nullptr && method->is_string())
      c.quant_method = std::string(method->get_string());
  }
  const boost::json::object* text = top.Object("text_config");
  RETURN_IF_ERROR(top.status());

  Reader r(*text, origin, "text_config.");
  CheckFixed(r);
  ParseShape(r, c);
  RETURN_IF_ERROR(r.status());
  RETURN_IF_ERROR(ParseRope(*text, origin, c));
  ParseEngram(r, c);
  ParseDrafts(r, c);
  RETURN_IF_ERROR(r.status());
  RETURN_IF_ERROR(DeriveTopology(origin, c));
  RETURN_IF_ERROR(CheckShape(origin, c));
  return c;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& dir) {
  const std::string path = dir + "/config.json";
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, kMaxConfigBytes));
  return ParseModelConfig(text, path);
}

absl::Status CheckTensorParallel(const ModelConfig& c, int world) {
  if (world == 1) return absl::OkStatus();
  const auto multiple = [world](std::string_view what, int64_t value, int64_t of) {
    if (value % of == 0) return absl::OkStatus();
    return absl::FailedPreconditionError(absl::StrCat("this model cannot be split over ", world,
                                                      " ranks: ", ToAbsl(what), " = ", value,
                                                      " is not a multiple of ", of));
  };
  RETURN_IF_ERROR(multiple("num_attention_heads", c.num_heads, world));
  RETURN_IF_ERROR(multiple("o_groups", c.o_groups, world));
  RETURN_IF_ERROR(multiple("engram_n_heads", c.engram_num_heads, world));
  RETURN_IF_ERROR(multiple("moe_intermediate_size", c.moe_intermediate_size, 128 * world));
  RETURN_IF_ERROR(multiple("head_dim * num_attention_heads",
                           static_cast<int64_t>(c.head_dim) * c.num_heads, 128 * world));
  RETURN_IF_ERROR(multiple("o_groups * o_lora_rank",
                           static_cast<int64_t>(c.o_groups) * c.o_lora_rank, 128 * world));
  RETURN_IF_ERROR(multiple("vocab_size", c.vocab_size, 128 * world));
  return multiple("(hc_mult + 1) * hidden_size",
                  static_cast<int64_t>(c.hc_mult + 1) * c.hidden_size, 128 * world);
}

}  // namespace twinspark
