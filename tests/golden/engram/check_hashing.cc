// Token map, constants and rows of windows.
#include <algorithm>
#include <cstdio>
#include <set>

#include "common/file_util.h"
#include "engram_service/tools/token_map_builder.h"
#include "tests/golden/engram/engram_checker.h"

namespace twinspark::golden {
namespace {

constexpr size_t kMaxTokenizerBytes = size_t{256} << 20;

EngramShape ShapeFrom(const json::object& config, const char* prefix) {
  const auto key = [&](const char* name) { return std::string(prefix) + name; };
  EngramShape shape;
  shape.layer_ids = Numbers<int>(config.at(key("layer_ids")));
  shape.max_ngram_size = config.at(key("max_ngram_size")).to_number<int>();
  shape.num_heads = config.at(key("n_heads")).to_number<int>();
  shape.num_classes = config.at(key("compressed_vocab_size")).to_number<uint64_t>();
  shape.pad_token_id = config.at(key("pad_token_id")).to_number<int32_t>();
  shape.head_dim = 32;
  return shape;
}

}  // namespace

void EngramChecker::CheckMapAgainstTokenizer() {
  const auto text = ReadFile(tokenizer_, kMaxTokenizerBytes);
  auto made = text.ok() ? engram::BuildTokenMap(*text)
                        : absl::StatusOr<std::vector<int32_t>>(text.status());
  int64_t differing = -1;
  if (made.ok() && made->size() == static_cast<size_t>(map_->size())) {
    differing = 0;
    for (size_t i = 0; i < made->size(); ++i)
      differing += (*made)[i] != map_->classes()[i];
  }
  Record(
      "token_map made from the tokenizer", differing == 0,
      made.ok() ? std::to_string(differing) + " ids differ" : std::string(made.status().message()));
}

void EngramChecker::CheckTokenMap(const json::object& want) {
  if (!map_) return report_.Error("token_map.json without token_map_i32.bin");
  Equal("token_map.entries", static_cast<int64_t>(map_->size()), Int(want.at("entries")));
  Equal("token_map.distinct", static_cast<int64_t>(map_->num_classes()), Int(want.at("distinct")));
  Equal("token_map.sha256_i32_le", Hex(map_->digest()), Text(want.at("sha256_i32_le")));
  if (want.contains("sha256_u32_le")) {
    Equal("token_map.sha256_u32_le", Hex(map_->digest()), Text(want.at("sha256_u32_le")));
  }
  if (want.contains("sha256_i64_le")) {
    Sha256 wide;
    for (const int32_t value : map_->classes())
      wide.UpdateU64(static_cast<uint64_t>(value));
    Equal("token_map.sha256_i64_le", Hex(wide.Finish()), Text(want.at("sha256_i64_le")));
  }
  for (const auto& item : want) {
    int last = 0;
    if (sscanf(std::string(item.key()).c_str(), "ids_0_to_%d_distinct", &last) != 1) continue;
    const auto ids = map_->classes().first(static_cast<size_t>(last) + 1);
    Equal("token_map." + std::string(item.key()),
          static_cast<int64_t>(std::set<int32_t>(ids.begin(), ids.end()).size()),
          Int(item.value()));
  }
  if (want.contains("samples")) {
    for (const auto& sample : want.at("samples").as_array()) {
      const auto id = sample.at("id").to_number<int32_t>();
      Record("token_map.samples " + std::to_string(id),
             id >= 0 && id < map_->size() && map_->Class(id) == Int(sample.at("compressed")));
    }
  }
  if (!want.contains("largest_classes")) return;
  for (const auto& item : want.at("largest_classes").as_array()) {
    std::vector<int32_t> members;
    for (int32_t id = 0; id < map_->size(); ++id) {
      if (map_->Class(id) == Int(item.at("compressed"))) members.push_back(id);
    }
    const auto first = Numbers<int32_t>(item.at("first_ids"));
    const bool count = static_cast<int64_t>(members.size()) == Int(item.at("count"));
    members.resize(std::min(members.size(), first.size()));
    Record("token_map.largest_classes " + std::to_string(Int(item.at("compressed"))),
           count && members == first);
  }
}

void EngramChecker::CheckConstants(const json::object& want) {
  const json::object& config = want.at("config").as_object();
  EngramShape shape = ShapeFrom(config, "engram_");
  shape.num_rows = Numbers<uint64_t>(config.at("engram_num_embeddings"));
  shape.head_dim = config.at("engram_head_dim").to_number<int>();
  shape.bucket_start = config.at("engram_vocab_size").to_number<uint64_t>();
  shape.vocab_size = config.at("vocab_size").to_number<int32_t>();
  auto layers = engram::DeriveLayerHashes(shape);
  Record("constants.rows", layers.ok(), std::string(layers.status().message()));
  if (!layers.ok()) return;
  layers_ = *std::move(layers);
  shape_ = shape;
  const uint64_t bound = engram::MultiplierBound(shape.num_classes);
  Equal("constants.multiplier_bound", bound, want.at("multiplier_bound").to_number<uint64_t>());
  // The largest class times the largest multiplier the generator can draw.
  const uint64_t largest = (2 * bound - 1) * (shape.num_classes - 1);
  for (size_t i = 0; i < layers_.size(); ++i) {
    const std::string layer = " layer " + std::to_string(layers_[i].layer_id);
    const LayerHash& got = layers_[i];
    Equal("constants.multipliers" + layer, got.multipliers,
          Numbers<uint64_t>(want.at("multipliers").at(i)));
    Equal("constants.primes" + layer, got.primes, Numbers<uint32_t>(want.at("primes").at(i)));
    Equal("constants.offsets" + layer, got.offsets, Numbers<uint64_t>(want.at("offsets").at(i)));
  }
  for (const auto& trace : want.at("prng").as_array()) {
    CheckTrace(trace.as_object(), shape.max_ngram_size, bound);
  }
  if (want.contains("hash_parameter_blob_sha256")) {
    Equal("constants.hash_parameter_blob_sha256", Hex(engram::HashParamsDigest(layers_)),
          Text(want.at("hash_parameter_blob_sha256")));
  }
  if (want.contains("max_product")) {
    Equal("constants.max_product", largest, want.at("max_product").to_number<uint64_t>());
  }
  if (want.contains("max_product_lt_2_63")) {
    Equal("constants.max_product_lt_2_63", largest < uint64_t{1} << 63,
          want.at("max_product_lt_2_63").as_bool());
  }
}

void EngramChecker::CheckTrace(const json::object& want, int count, uint64_t bound) {
  const auto seed = want.at("seed").to_number<uint64_t>();
  const engram::GeneratorTrace trace = engram::TraceGenerator(seed, count, bound);
  const std::string name = "constants.prng seed " + std::to_string(seed) + " ";
  const auto hex_list = [](const std::vector<uint64_t>& values) {
    std::string text;
    char hex[20];
    for (const uint64_t value : values) {
      snprintf(hex, sizeof(hex), "%016llx ", static_cast<unsigned long long>(value));
      text += hex;
    }
    return text;
  };
  const auto join = [](const json::value& list) {
    std::string text;
    for (const auto& v : list.as_array())
      text += Text(v) + " ";
    return text;
  };
  Equal(name + "words", hex_list(trace.seed_words),
        join(want.at("seedsequence_generate_state_4xu64")));
  Equal(name + "state", trace.state_hex, Text(want.at("pcg64_state_after_seeding_hex")));
  Equal(name + "increment", trace.increment_hex, Text(want.at("pcg64_increment_hex")));
  Equal(name + "raw", hex_list(trace.raw_outputs), join(want.at("raw_u64_outputs_hex")));
  Equal(name + "draws", trace.draws, Numbers<uint64_t>(want.at("bounded_draws")));
  std::vector<uint64_t> multipliers;
  for (const uint64_t draw : trace.draws)
    multipliers.push_back(2 * draw + 1);
  Equal(name + "multipliers", multipliers, Numbers<uint64_t>(want.at("multipliers")));
}

void EngramChecker::CheckHashSmall(const json::object& want) {
  const json::object& config = want.at("config").as_object();
  EngramShape shape = ShapeFrom(config, "");
  shape.bucket_start = config.at("bucket_start").to_number<uint64_t>();
  shape.num_rows = Numbers<uint64_t>(want.at("rows_per_layer"));
  auto map = TokenMap::FromClasses(Numbers<int32_t>(want.at("token_map")));
  absl::StatusOr<Hasher> hasher =
      map.ok() ? absl::UnknownError("") : absl::StatusOr<Hasher>(map.status());
  if (map.ok()) {
    shape.vocab_size = map->size();
    hasher = Hasher::Create(shape, *std::move(map));
  }
  Record("hash_small.rows_per_layer", hasher.ok(), std::string(hasher.status().message()));
  if (!hasher.ok()) return;
  Equal("hash_small.multiplier_bound", engram::MultiplierBound(shape.num_classes),
        want.at("multiplier_bound").to_number<uint64_t>());
  Equal("hash_small.pad_compressed", static_cast<int64_t>(hasher->pad_class()),
        Int(config.at("pad_compressed")));
  for (int i = 0; i < shape.num_layers(); ++i) {
    const size_t l = static_cast<size_t>(i);
    const std::string layer = " layer " + std::to_string(shape.layer_ids[l]);
    const LayerHash& got = hasher->layer(i);
    Equal("hash_small.multipliers" + layer, got.multipliers,
          Numbers<uint64_t>(want.at("multipliers").at(l)));
    Equal("hash_small.primes" + layer, got.primes, Numbers<uint32_t>(want.at("primes").at(l)));
    Equal("hash_small.offsets" + layer, got.offsets, Numbers<uint64_t>(want.at("offsets").at(l)));
    if (want.contains("prng_seeds")) {
      Equal("hash_small.prng_seeds" + layer, int64_t{10007} * shape.layer_ids[l],
            Int(want.at("prng_seeds").at(l)));
    }
  }
  CheckHashSmallRows(*hasher, want);
  CheckHashTraces(*hasher, want);
  if (want.contains("chunked")) CheckChunked(*hasher, want);
}

// rows[] and dead_case.rows[]: every layer of every position.
void EngramChecker::CheckHashSmallRows(const Hasher& hasher, const json::object& want) {
  const auto ids = Numbers<int32_t>(want.at("sequence"));
  const auto check = [&](const std::string& name, const json::value& rows,
                         const std::vector<uint8_t>& dead) {
    std::vector<Window> windows(ids.size());
    const bool hashed = hasher.Windows(ids, 0, dead, windows).ok();
    for (const auto& row : rows.as_array()) {
      const auto pos = row.at("pos").to_number<size_t>();
      for (int i = 0; i < hasher.shape().num_layers(); ++i) {
        const std::string key =
            "layer" + std::to_string(hasher.shape().layer_ids[static_cast<size_t>(i)]);
        std::vector<uint64_t> got(static_cast<size_t>(hasher.shape().num_columns()));
        if (hashed && pos < windows.size()) hasher.Rows(i, windows[pos], got);
        Record(name + " pos " + std::to_string(pos) + " " + key,
               hashed && pos < ids.size() && got == Numbers<uint64_t>(row.at(key)));
      }
    }
  };
  check("hash_small.rows", want.at("rows"), {});
  if (!want.contains("dead_case")) return;
  std::vector<uint8_t> dead;
  for (const int live : Numbers<int>(want.at("dead_case").at("live")))
    dead.push_back(live == 0);
  check("hash_small.dead_case", want.at("dead_case").at("rows"), dead);
}

// trace_pos_P: window, products and running hash of each layer.
void EngramChecker::CheckHashTraces(const Hasher& hasher, const json::object& want) {
  const auto ids = Numbers<int32_t>(want.at("sequence"));
  std::vector<Window> windows(ids.size());
  if (!hasher.Windows(ids, 0, {}, windows).ok()) return;
  const size_t size = static_cast<size_t>(hasher.shape().max_ngram_size);
  for (const auto& item : want) {
    size_t pos = 0;
    if (sscanf(std::string(item.key()).c_str(), "trace_pos_%zu", &pos) != 1) continue;
    for (size_t l = 0; l < item.value().as_array().size(); ++l) {
      const json::value& trace = item.value().at(l);
      const Window& window = windows.at(pos);
      const std::vector<int64_t> window_ids(window.ids.begin(),
                                            window.ids.begin() + static_cast<long>(size));
      std::vector<uint64_t> products;
      for (size_t k = 0; k < size; ++k) {
        products.push_back(static_cast<uint64_t>(window.ids[k]) *
                           hasher.layer(static_cast<int>(l)).multipliers[k]);
      }
      std::array<uint64_t, engram::kMaxNgram - 1> hashes{};
      hasher.OrderHashes(static_cast<int>(l), window, hashes);
      const std::string name =
          "hash_small." + std::string(item.key()) + " layer index " + std::to_string(l) + " ";
      Equal(name + "window", window_ids, Numbers<int64_t>(trace.at("window")));
      Equal(name + "products", products, Numbers<uint64_t>(trace.at("products")));
      Equal(name + "rolling",
            std::vector<uint64_t>(hashes.begin(), hashes.begin() + static_cast<long>(size) - 1),
            Numbers<uint64_t>(trace.at("rolling")));
    }
  }
}

void EngramChecker::CheckChunked(const Hasher& hasher, const json::object& want) {
  const auto ids = Numbers<int32_t>(want.at("sequence"));
  const auto sizes = Numbers<size_t>(want.at("chunked").at("chunk_sizes"));
  const json::array& histories =
      want.at("chunked").at("history_after_each_chunk_newest_first").as_array();
  const size_t lookback = static_cast<size_t>(hasher.shape().max_ngram_size - 1);
  std::vector<Window> whole(ids.size());
  if (!hasher.Windows(ids, 0, {}, whole).ok()) return;
  size_t begin = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    const size_t history = std::min(begin, lookback);
    std::vector<Window> part(sizes[i]);
    bool ok = begin + sizes[i] <= ids.size();
    if (ok) {
      ok = hasher
               .Windows(std::span(ids).subspan(begin - history, sizes[i] + history), history, {},
                        part)
               .ok();
      for (size_t k = 0; ok && k < part.size(); ++k)
        ok = part[k].ids == whole[begin + k].ids;
    }
    begin += sizes[i];
    const std::string name = "hash_small.chunked " + std::to_string(i);
    Record(name + " windows", ok);
    std::vector<int64_t> after;
    for (size_t k = 1; k <= lookback; ++k) {
      after.push_back(k <= begin && begin <= ids.size() ? hasher.token_map().Class(ids[begin - k])
                                                        : -1);
    }
    Equal(name + " history", after, Numbers<int64_t>(histories.at(i)));
  }
}

void EngramChecker::CheckHashReleased(const json::object& want) {
  if (!map_ || !shape_) {
    return report_.Error("hash_released.json without token_map_i32.bin and constants.json");
  }
  const auto hasher = Hasher::Create(*shape_, *map_);
  if (!hasher.ok()) return report_.Error(std::string(hasher.status().message()));
  const size_t columns = static_cast<size_t>(shape_->num_columns());
  if (want.contains("columns_per_layer")) {
    Equal("hash_released.columns_per_layer", static_cast<int64_t>(columns),
          Int(want.at("columns_per_layer")));
  }
  for (const auto& item : want.at("cases").as_array()) {
    const std::string name = "hash_released." + Text(item.at("name")) + " ";
    const auto ids = Numbers<int32_t>(item.at("token_ids"));
    std::vector<uint8_t> dead;
    if (item.as_object().contains("live")) {
      for (const int live : Numbers<int>(item.at("live")))
        dead.push_back(live == 0);
    }
    std::vector<Window> windows(ids.size());
    const bool hashed = hasher->Windows(ids, 0, dead, windows).ok();
    if (item.as_object().contains("compressed")) {
      std::vector<int32_t> classes;
      for (const int32_t id : ids)
        classes.push_back(map_->Class(id));
      Equal(name + "compressed", classes, Numbers<int32_t>(item.at("compressed")));
    }
    Sha256 digest;
    std::vector<std::vector<std::vector<uint64_t>>> rows(static_cast<size_t>(shape_->num_layers()));
    for (const Window& window : windows) {
      for (int i = 0; i < shape_->num_layers(); ++i) {
        std::vector<uint64_t> got(columns);
        hasher->Rows(i, window, got);
        for (const uint64_t row : got)
          digest.UpdateU64(row);
        rows[static_cast<size_t>(i)].push_back(std::move(got));
      }
    }
    for (int i = 0; i < shape_->num_layers(); ++i) {
      const size_t l = static_cast<size_t>(i);
      const std::string key = "rows_layer" + std::to_string(shape_->layer_ids[l]);
      if (!item.as_object().contains(key)) continue;
      std::vector<std::vector<uint64_t>> expected;
      for (const auto& row : item.at(key).as_array()) {
        expected.push_back(Numbers<uint64_t>(row));
      }
      Record(name + key, hashed && rows[l] == expected);
    }
    for (const auto& field : item.as_object()) {
      if (!std::string(field.key()).starts_with("sha256_i64_le")) continue;
      Equal(name + "sha256", Hex(digest.Finish()), Text(field.value()));
    }
  }
}

}  // namespace twinspark::golden
