// golden_engram --dir DIR [--tokenizer FILE]: compares hashing, token map, dequantisation, gate and
// packed format with a directory of Engram vectors. Every file that is there counts; which files
// hold what is the vectors' README. The tokenizer lets make_token_map's result be compared with the
// map too. Skipped by rule: digests of native files that are not here. Exit codes: golden_report.h.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "boost/json.hpp"
#include "common/file_util.h"
#include "engram_service/store/crc32c.h"
#include "engram_service/store/file_io.h"
#include "engram_service/store/hasher.h"
#include "engram_service/store/row_format.h"
#include "engram_service/store/synthetic.h"
#include "engram_service/tools/token_map_builder.h"
#include "kernels/engram/engram.h"
#include "tests/golden/golden_report.h"

namespace twinspark::golden {
namespace {

namespace json = boost::json;
using engram::EngramShape;
using engram::Hasher;
using engram::Hex;
using engram::LayerHash;
using engram::Sha256;
using engram::TokenMap;
using engram::Window;

constexpr size_t kMaxFileBytes = size_t{256} << 20;

// Reading of JSON with a shape that is known: a wrong one throws out of Boost.JSON and ends the
// check of that file as an error.
int64_t Int(const json::value& value) {
  return value.to_number<int64_t>();
}

template <typename T>
std::vector<T> Numbers(const json::value& list) {
  std::vector<T> out;
  for (const auto& v : list.as_array())
    out.push_back(v.to_number<T>());
  return out;
}

std::string Text(const json::value& value) {
  return std::string(value.as_string());
}

std::string HexOfBytes(std::span<const uint8_t> bytes) {
  return Hex(bytes);
}

template <typename T>
std::string HexOfStruct(const T& value, size_t bytes) {
  return Hex({reinterpret_cast<const uint8_t*>(&value), bytes});
}

std::vector<uint8_t> BytesOfHex(const std::string& hex) {
  std::vector<uint8_t> bytes;
  for (size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

class Checker {
 public:
  Checker(std::string dir, std::string tokenizer)
      : dir_(std::move(dir)), tokenizer_(std::move(tokenizer)) {}

  int Run();

 private:
  void Record(const std::string& name, bool ok, const std::string& detail = "") {
    report_.Plan(1);
    report_.CompareRecord(name, ok, detail);
  }
  template <typename T>
  void Equal(const std::string& name, const T& got, const T& want) {
    Record(name, got == want);
  }
  void Equal(const std::string& name, const std::string& got, const std::string& want) {
    Record(name, got == want, got == want ? got : got + " instead of " + want);
  }

  std::optional<json::object> ReadJson(const std::string& name);
  void CheckTokenMap(const json::object& want);
  void CheckMapAgainstTokenizer();
  void CheckConstants(const json::object& want);
  void CheckTrace(const json::object& want, int count, uint64_t bound);
  void CheckHashSmall(const json::object& want);
  void CheckHashSmallRows(const Hasher& hasher, const json::object& want);
  void CheckHashTraces(const Hasher& hasher, const json::object& want);
  void CheckChunked(const Hasher& hasher, const json::object& want);
  void CheckHashReleased(const json::object& want);
  void CheckDequant(const json::object& want);
  void CheckDequantRows(const json::object& want);
  void CheckGate(const json::object& want);
  void CheckShards(const json::object& want);
  void CheckRanges(const LayerHash& layer, const json::object& ranges);
  void CheckCompat(const json::object& want);
  void CheckPackedPage(const json::object& want);
  void CheckPages(const json::object& want,
                  const engram::PackedLayout& layout,
                  const std::vector<uint8_t>& data);
  void CheckTinyFile(const json::object& want,
                     const engram::PackedLayout& layout,
                     const std::vector<uint8_t>& data);

  const std::string dir_;
  const std::string tokenizer_;
  GoldenReport report_;
  ThreadPool pool_{1};
  std::optional<TokenMap> map_;       // token_map_i32.bin
  std::optional<EngramShape> shape_;  // of constants.json
  std::vector<LayerHash> layers_;     // that shape's constants
};

std::optional<json::object> Checker::ReadJson(const std::string& name) {
  const std::string path = dir_ + "/" + name;
  if (!engram::FileExists(path)) return std::nullopt;
  const auto text = ReadFile(path, kMaxFileBytes);
  boost::system::error_code error;
  json::value value;
  if (text.ok()) value = json::parse(*text, error);
  if (!text.ok() || error || !value.is_object()) {
    report_.Error(path + " is not readable JSON");
    return std::nullopt;
  }
  return value.as_object();
}

int Checker::Run() {
  const std::string map_path = dir_ + "/token_map_i32.bin";
  if (engram::FileExists(map_path)) {
    const auto bytes = engram::ReadWholeFile(map_path, kMaxFileBytes);
    auto map = bytes.ok() ? TokenMap::FromBytes(*bytes) : absl::StatusOr<TokenMap>(bytes.status());
    Record("token_map_i32.bin", map.ok(), std::string(map.status().message()));
    if (map.ok()) map_ = *std::move(map);
    if (map_ && !tokenizer_.empty()) CheckMapAgainstTokenizer();
  }
  const std::pair<const char*, void (Checker::*)(const json::object&)> files[] = {
      {"token_map.json", &Checker::CheckTokenMap},
      {"constants.json", &Checker::CheckConstants},
      {"hash_small.json", &Checker::CheckHashSmall},
      {"hash_released.json", &Checker::CheckHashReleased},
      {"dequant.json", &Checker::CheckDequant},
      {"gate_small.json", &Checker::CheckGate},
      {"shards.json", &Checker::CheckShards},
      {"packed_page.json", &Checker::CheckPackedPage},
  };
  for (const auto& [name, check] : files) {
    const auto want = ReadJson(name);
    if (!want) continue;
    try {
      (this->*check)(*want);
    } catch (const std::exception& error) {
      report_.Error(std::string(name) + ": " + error.what());
    }
  }
  return report_.Finish();
}

void Checker::CheckMapAgainstTokenizer() {
  const auto text = ReadFile(tokenizer_, kMaxFileBytes);
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

void Checker::CheckTokenMap(const json::object& want) {
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

void Checker::CheckConstants(const json::object& want) {
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

void Checker::CheckTrace(const json::object& want, int count, uint64_t bound) {
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

void Checker::CheckHashSmall(const json::object& want) {
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
void Checker::CheckHashSmallRows(const Hasher& hasher, const json::object& want) {
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
void Checker::CheckHashTraces(const Hasher& hasher, const json::object& want) {
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

void Checker::CheckChunked(const Hasher& hasher, const json::object& want) {
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

void Checker::CheckHashReleased(const json::object& want) {
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

// Rows of `cols` codes, one scale per 32, through the model's own kernel.
std::vector<uint16_t> Dequantize(ThreadPool& pool,
                                 const std::vector<uint8_t>& codes,
                                 const std::vector<uint8_t>& scales,
                                 int64_t cols) {
  std::vector<Bf16> out(codes.size());
  const auto rows = static_cast<int64_t>(codes.size()) / cols;
  EngramDequantizeParams params;
  params.codes = BasicTensorView<const void*>{codes.data(), DType::kF8E4M3, rows, cols, cols};
  params.scales =
      BasicTensorView<const void*>{scales.data(), DType::kF8E8M0, rows, cols / 32, cols / 32};
  params.out = TensorView{out.data(), DType::kBf16, rows, cols, cols};
  EngramDequantizeCpu(params, Launch{&pool, nullptr, nullptr});
  std::vector<uint16_t> bits;
  for (const Bf16 value : out)
    bits.push_back(value.bits);
  return bits;
}

bool IsNanBits(uint16_t bits) {
  return (bits & 0x7fff) > 0x7f80;
}

std::string DigestOf(const std::vector<uint16_t>& bits) {
  return Hex(
      engram::Sha256Of(std::span(reinterpret_cast<const uint8_t*>(bits.data()), bits.size() * 2)));
}

// The whole code x scale table under the three rules for edge codes.
std::vector<uint16_t> DequantTable(ThreadPool& pool, const std::string& rule) {
  std::vector<uint8_t> codes;
  std::vector<uint8_t> scales;
  for (int scale = 0; scale < 256; ++scale) {
    for (int code = 0; code < 256; ++code)
      codes.push_back(static_cast<uint8_t>(code));
    scales.insert(scales.end(), 8, static_cast<uint8_t>(scale));
  }
  std::vector<uint16_t> bits = Dequantize(pool, codes, scales, 256);
  for (size_t i = 0; i < bits.size(); ++i) {
    const size_t scale = i / 256;
    const bool nan_code = (codes[i] & 0x7f) == 0x7f;
    if (rule == "valid") {
      if (nan_code || scale == 255) bits[i] = 0;
    } else if (rule == "reference") {
      if (IsNanBits(bits[i])) bits[i] = 0x7fc0;
    } else {
      // The exponent shift: scale 0 reads as 0, scale 255 as infinity.
      const float shifted = std::bit_cast<float>(static_cast<uint32_t>(scale) << 23);
      if (scale == 0 || scale == 255) bits[i] = ToBf16(E4M3ToF32(codes[i]) * shifted).bits;
      if (nan_code || IsNanBits(bits[i])) bits[i] = 0xffff;
    }
  }
  return bits;
}

void Checker::CheckDequant(const json::object& want) {
  for (const auto& sample : want.at("e4m3fn_samples").as_array()) {
    const auto code = sample.at("code").to_number<uint8_t>();
    const float got = E4M3ToF32(code);
    const json::value& value = sample.at("value");
    const bool ok = value.is_null() ? std::isnan(got)
                                    : static_cast<double>(got) == value.to_number<double>() &&
                                          std::signbit(got) == (code >= 0x80);
    Record("dequant.e4m3fn " + std::to_string(code), ok);
  }
  for (const auto& pair : want.at("pairs").as_array()) {
    const auto scale = pair.at("scale").to_number<uint8_t>();
    const auto code = pair.at("code").to_number<uint8_t>();
    const std::vector<uint16_t> bits =
        Dequantize(pool_, std::vector<uint8_t>(32, code), {scale}, 32);
    char hex[8];
    snprintf(hex, sizeof(hex), "%04x", bits[0]);
    Equal("dequant.pair scale " + std::to_string(scale) + " code " + std::to_string(code),
          std::string(hex), Text(pair.at("bf16_hex")));
  }
  for (const auto& field : want) {
    if (!std::string(field.key()).starts_with("lut_")) continue;
    for (const auto& digest : field.value().as_object()) {
      const std::string rule(digest.key());
      const std::string kind = rule.starts_with("valid")       ? "valid"
                               : rule.starts_with("reference") ? "reference"
                                                               : "shift";
      Equal("dequant.table " + kind, DigestOf(DequantTable(pool_, kind)), Text(digest.value()));
    }
  }
  CheckDequantRows(want);
}

// Byte j of row r of the synthetic table, NaN codes included.
uint8_t SyntheticByte(uint64_t row, uint64_t j) {
  const auto h = static_cast<uint32_t>(row * 2654435761u + j * 40503u);
  return static_cast<uint8_t>(j < 256 ? (h >> 7) & 255 : 100 + (h >> 9) % 40);
}

void Checker::CheckDequantRows(const json::object& want) {
  if (want.contains("synthetic_rows_sha256")) {
    for (const auto& item : want.at("synthetic_rows_sha256").as_array()) {
      std::vector<uint8_t> codes;
      std::vector<uint8_t> scales;
      const auto rows = Numbers<uint64_t>(item.at("rows"));
      for (const uint64_t row : rows) {
        for (uint64_t j = 0; j < 256; ++j)
          codes.push_back(SyntheticByte(row, j));
        for (uint64_t j = 256; j < 264; ++j)
          scales.push_back(SyntheticByte(row, j));
      }
      std::vector<uint16_t> bits = Dequantize(pool_, codes, scales, 256);
      for (uint16_t& value : bits)
        value = IsNanBits(value) ? uint16_t{0xffff} : value;
      for (const auto& field : item.as_object()) {
        if (!std::string(field.key()).starts_with("sha256")) continue;
        Equal("dequant.rows " + std::to_string(rows.front()) + ".. (" +
                  std::to_string(rows.size()) + ")",
              DigestOf(bits), Text(field.value()));
      }
    }
  }
  if (!want.contains("clean_row_example")) return;
  const json::value& example = want.at("clean_row_example");
  std::vector<uint8_t> weights(256);
  std::vector<uint8_t> scales(8);
  engram::SyntheticRow(example.at("row").to_number<uint64_t>(), weights, scales);
  std::vector<uint8_t> record = weights;
  record.insert(record.end(), scales.begin(), scales.end());
  Record("dequant.clean_row record", Hex(record) == Text(example.at("record_hex")));
  const std::vector<uint16_t> bits = Dequantize(pool_, weights, scales, 256);
  Record("dequant.clean_row bf16",
         Hex(std::span(reinterpret_cast<const uint8_t*>(bits.data()), bits.size() * 2)) ==
             Text(example.at("bf16_hex_le")));
}

// Numbers of any depth of nesting, in order.
void Flatten(const json::value& value, std::vector<double>& out) {
  if (const auto* list = value.if_array()) {
    for (const auto& item : *list)
      Flatten(item, out);
  } else {
    out.push_back(value.to_number<double>());
  }
}

std::vector<double> Flat(const json::value& value) {
  std::vector<double> out;
  Flatten(value, out);
  return out;
}

// The specification's bounds: f32 within 1e-6 relative, bf16 equal or one unit apart.
void Checker::CheckGate(const json::object& want) {
  const auto streams = want.at("hc_mult").to_number<int64_t>();
  const auto dim = want.at("dim").to_number<int64_t>();
  const std::vector<double> x64 = Flat(want.at("x"));
  const std::vector<double> kv64 = Flat(want.at("kv"));
  const std::vector<double> q = Flat(want.at("q_weight"));
  const std::vector<double> k = Flat(want.at("k_weight"));
  const auto rows = static_cast<int64_t>(x64.size()) / (streams * dim);
  const std::vector<float> x(x64.begin(), x64.end());
  const std::vector<float> kv(kv64.begin(), kv64.end());
  std::vector<float> weight;
  for (size_t i = 0; i < q.size(); ++i)
    weight.push_back(static_cast<float>(q[i] * k[i]));
  std::vector<uint8_t> mask;
  for (const auto& live : want.at("live").as_array()) {
    mask.push_back(live.is_bool() ? !live.as_bool() : Int(live) == 0);
  }
  EngramGateParams params;
  params.streams = MakeView(x.data(), rows, streams * dim);
  params.kv = MakeView(kv.data(), rows, (streams + 1) * dim);
  params.weight = MakeView(weight.data(), streams, dim);
  params.eps = static_cast<float>(want.at("eps").to_number<double>());
  params.image_mask = mask.data();
  std::vector<float> out(x.size());
  std::vector<float> gate(static_cast<size_t>(rows * streams));
  params.out = MakeView(out.data(), rows, streams * dim);
  params.gate = MakeView(gate.data(), rows, streams);
  const Launch launch{&pool_, nullptr, nullptr};
  EngramGateCpu(params, launch);
  const auto compare = [this](const std::string& name, const std::vector<float>& got,
                              const std::vector<double>& expected) {
    const Distance distance =
        Distance::Of(std::span<const float>(got), std::span<const double>(expected));
    report_.Plan(1);
    report_.Compare(name, distance, distance.rel_l2, 1e-6);
  };
  compare("gate_small.gate", gate, Flat(want.at("gate")));
  compare("gate_small.out_f64", out, Flat(want.at("out_f64")));
  if (!want.contains("out_bf16_hex")) return;
  std::vector<Bf16> x16;
  std::vector<Bf16> kv16;
  for (const float value : x)
    x16.push_back(ToBf16(value));
  for (const float value : kv)
    kv16.push_back(ToBf16(value));
  std::vector<Bf16> out16(x.size());
  params.streams = MakeView(x16.data(), rows, streams * dim);
  params.streams.dtype = DType::kBf16;
  params.kv = MakeView(kv16.data(), rows, (streams + 1) * dim);
  params.out = MakeView(out16.data(), rows, streams * dim);
  EngramGateCpu(params, launch);
  std::vector<std::string> hex;
  const std::function<void(const json::value&)> collect = [&](const json::value& value) {
    if (value.is_string()) return hex.push_back(Text(value));
    for (const auto& item : value.as_array())
      collect(item);
  };
  collect(want.at("out_bf16_hex"));
  int worst = hex.size() == out16.size() ? 0 : INT32_MAX;
  for (size_t i = 0; worst != INT32_MAX && i < hex.size(); ++i) {
    worst = std::max(worst, std::abs(out16[i].bits - std::stoi(hex[i], nullptr, 16)));
  }
  Record("gate_small.out_bf16_hex", worst <= 1, std::to_string(worst) + " units apart");
}

void Checker::CheckShards(const json::object& want) {
  if (!shape_) return report_.Error("shards.json without constants.json");
  for (const LayerHash& layer : layers_) {
    const std::string id = std::to_string(layer.layer_id);
    if (want.at("native").as_object().contains(id)) {
      const json::value& native = want.at("native").at(id);
      Equal("shards.native rows layer " + id, layer.num_rows,
            native.at("rows").to_number<uint64_t>());
      Equal("shards.native scale_offset layer " + id,
            native.at("weight_offset").to_number<uint64_t>() +
                layer.num_rows * static_cast<uint64_t>(shape_->row_weight_bytes()),
            native.at("scale_offset").to_number<uint64_t>());
    }
    if (want.at("ranges").as_object().contains(id)) {
      CheckRanges(layer, want.at("ranges").at(id).as_object());
    }
  }
  CheckCompat(want);
}

void Checker::CheckRanges(const LayerHash& layer, const json::object& ranges) {
  const auto bounds = [&](const std::vector<int>& columns) {
    const auto first = static_cast<size_t>(columns.front());
    const auto last = static_cast<size_t>(columns.back());
    return std::pair(layer.offsets[first], layer.offsets[last] + layer.primes[last]);
  };
  for (const auto& split : ranges) {
    const std::string kind(split.key());
    const int of = std::stoi(kind.substr(kind.rfind('_') + 1));
    for (const auto& item : split.value().as_array()) {
      const std::string name =
          "shards.ranges layer " + std::to_string(layer.layer_id) + " " + kind + " ";
      if (kind.starts_with("balanced")) {
        const auto node = item.at("node").to_number<int>();
        const auto columns = engram::BalancedColumns(*shape_, node, of);
        Record(name + std::to_string(node),
               columns.ok() && *columns == Numbers<int>(item.at("columns")));
        continue;
      }
      const auto rank = item.at("rank").to_number<int>();
      const auto lo = item.at("row_lo").to_number<uint64_t>();
      const auto hi = item.at("row_hi").to_number<uint64_t>();
      if (kind.starts_with("contiguous")) {
        const auto columns = engram::ContiguousColumns(*shape_, rank, of);
        const auto range = Numbers<int>(item.at("columns"));
        Record(name + std::to_string(rank),
               columns.ok() && !columns->empty() && columns->front() == range.at(0) &&
                   columns->back() + 1 == range.at(1) && bounds(*columns) == std::pair(lo, hi));
      } else {
        const uint64_t n = static_cast<uint64_t>(of);
        const uint64_t r = static_cast<uint64_t>(rank);
        Record(name + std::to_string(rank),
               lo == layer.num_rows * r / n && hi == layer.num_rows * (r + 1) / n);
      }
    }
  }
}

// Offsets in files of the other packed layout: 4096 + (row - row_lo) * row bytes, split by columns.
void Checker::CheckCompat(const json::object& want) {
  const uint64_t row_bytes =
      static_cast<uint64_t>(shape_->row_weight_bytes() + shape_->row_scale_bytes());
  if (want.contains("compat_DSV41EN1_examples")) {
    for (const auto& item : want.at("compat_DSV41EN1_examples").as_array()) {
      const json::object& example = item.as_object();
      const auto rank = example.at("rank").to_number<int>();
      const auto columns =
          engram::ContiguousColumns(*shape_, rank, example.at("of").to_number<int>());
      bool ok = false;
      for (const LayerHash& layer : layers_) {
        if (!columns.ok() || layer.layer_id != example.at("layer").to_number<int>()) continue;
        const auto last = static_cast<size_t>(columns->back());
        const uint64_t lo = layer.offsets[static_cast<size_t>(columns->front())];
        const uint64_t hi = layer.offsets[last] + layer.primes[last];
        ok = true;
        if (example.contains("file_bytes")) {
          ok = 4096 + (hi - lo) * row_bytes == example.at("file_bytes").to_number<uint64_t>();
        } else {
          const uint64_t row = example.at("row").to_number<uint64_t>();
          const uint64_t offset = 4096 + (row - lo) * row_bytes;
          const bool straddles = offset / 4096 != (offset + row_bytes - 1) / 4096;
          ok = offset == example.at("file_offset").to_number<uint64_t>() &&
               (!example.contains("straddles_4k") ||
                straddles == example.at("straddles_4k").as_bool());
        }
      }
      Record("shards.compat " + json::serialize(item), ok);
    }
  }
  for (const auto& field : want) {
    if (!std::string(field.key()).starts_with("compat_published")) continue;
    for (const auto& file : field.value().as_object()) {
      report_.Plan(1);
      report_.Skip("shards." + std::string(file.key()), "the native files are not here", true);
    }
  }
}

void Checker::CheckPackedPage(const json::object& want) {
  const std::string check = "123456789";
  char hex[16];
  snprintf(hex, sizeof(hex), "%08x",
           engram::Crc32c({reinterpret_cast<const uint8_t*>(check.data()), check.size()}));
  Equal("packed_page.crc32c_check", std::string(hex), Text(want.at("crc32c_check_123456789")));

  // The shape behind the example: one layer whose columns are the segments.
  const json::array& segments = want.at("segments").as_array();
  LayerHash layer;
  layer.layer_id = want.at("layer").to_number<int>();
  EngramShape shape;
  shape.head_dim = 256;
  engram::PackTarget target;
  for (const auto& segment : segments) {
    layer.primes.push_back(segment.at("prime").to_number<uint32_t>());
    layer.offsets.push_back(layer.num_rows);
    layer.num_rows += layer.primes.back();
    shape.num_heads = std::max(shape.num_heads, segment.at("head").to_number<int>() + 1);
    shape.max_ngram_size = std::max(shape.max_ngram_size, segment.at("order").to_number<int>());
    target.columns.push_back(segment.at("column").to_number<int>());
  }
  auto planned = engram::PlanPackedFile(shape, layer, target);
  if (!planned.ok()) return report_.Error(std::string(planned.status().message()));
  engram::PackedLayout layout = *std::move(planned);
  const std::string generation = Text(want.at("generation_hex"));
  layout.header.generation = std::stoull(generation, nullptr, 16);
  for (size_t i = 0; i < segments.size(); ++i) {
    const engram::PackedSegment& got = layout.segments.at(i);
    const json::value& s = segments[i];
    Record("packed_page.segment " + std::to_string(i),
           got.global_row_lo == s.at("global_row_lo").to_number<uint64_t>() &&
               got.rows == s.at("rows").to_number<uint64_t>() &&
               got.first_page == s.at("first_page").to_number<uint64_t>() &&
               got.page_count == s.at("page_count").to_number<uint64_t>());
    Equal("packed_page.segment_entry " + std::to_string(i), HexOfStruct(got, sizeof(got)),
          Text(want.at("segment_entries_hex").at(i)));
  }
  std::vector<uint8_t> data(layout.header.pages * engram::kPageBytes);
  for (uint64_t page = 0; page < layout.header.pages; ++page) {
    const engram::PageRows rows = engram::RowsOfPage(layout, page);
    std::vector<uint8_t> weights(rows.count * 256);
    std::vector<uint8_t> scales(rows.count * 8);
    for (uint32_t i = 0; i < rows.count; ++i) {
      engram::SyntheticRow(rows.first_row + i, std::span(weights).subspan(i * 256, 256),
                           std::span(scales).subspan(i * 8, 8));
    }
    engram::BuildPage(layout, page, weights, scales,
                      std::span(data).subspan(page * engram::kPageBytes, engram::kPageBytes));
  }
  CheckPages(want, layout, data);
  Equal("packed_page.data_region_sha256", Hex(engram::Sha256Of(data)),
        Text(want.at("data_region_sha256")));
  snprintf(hex, sizeof(hex), "%08x", engram::Crc32c(data));
  Equal("packed_page.data_region_crc32c", std::string(hex), Text(want.at("data_region_crc32c")));
  if (want.contains("tiny_file")) CheckTinyFile(want.at("tiny_file").as_object(), layout, data);
  if (want.contains("compat_header_example")) {
    const std::string compat = Text(want.at("compat_header_example").at("hex"));
    Record("packed_page.compat_header",
           BytesOfHex(compat).size() == 48 && compat.starts_with("44535631454e3431"));
  }
}

void Checker::CheckPages(const json::object& want,
                         const engram::PackedLayout& layout,
                         const std::vector<uint8_t>& data) {
  for (const auto& item : want.at("pages").as_array()) {
    const auto index = item.at("index").to_number<uint64_t>();
    const std::string name = "packed_page.page " + std::to_string(index) + " ";
    if (index >= layout.header.pages) {
      Record(name, false, "there is no such page");
      continue;
    }
    const auto page = std::span(data).subspan(index * engram::kPageBytes, engram::kPageBytes);
    Equal(name + "sha256", Hex(engram::Sha256Of(page)), Text(item.at("sha256")));
    Equal(name + "crc32c", HexOfBytes(page.subspan(4092)), Text(item.at("crc32c_hex")));
    Equal(name + "trailer", HexOfBytes(page.subspan(engram::kPageTrailerOffset)),
          Text(item.at("trailer_hex")));
    Record(name + "is accepted", engram::CheckPage(layout, index, page).ok());
  }
  for (const auto& item : want.at("lookups").as_array()) {
    const auto bucket = item.at("bucket").to_number<uint64_t>();
    bool ok = false;
    for (const engram::PackedSegment& segment : layout.segments) {
      if (segment.column != item.at("column").to_number<uint32_t>()) continue;
      ok = segment.first_page + bucket / engram::kRowsPerPage ==
               item.at("page").to_number<uint64_t>() &&
           bucket % engram::kRowsPerPage == item.at("slot").to_number<uint64_t>();
    }
    Record("packed_page.lookup " + json::serialize(item), ok);
  }
}

void Checker::CheckTinyFile(const json::object& want,
                            const engram::PackedLayout& planned,
                            const std::vector<uint8_t>& data) {
  engram::PackedLayout layout = planned;
  std::vector<engram::ExtentEntry> extents;
  for (uint64_t i = 0; i < layout.num_extents(); ++i) {
    const auto bytes = std::span(data).subspan(i * engram::kPagesPerExtent * engram::kPageBytes,
                                               size_t{layout.ExtentPages(i)} * engram::kPageBytes);
    extents.push_back({engram::Crc32c(bytes), layout.ExtentPages(i), engram::Sha256Of(bytes)});
  }
  const std::vector<uint8_t> footer = engram::FooterBytes(layout, extents);
  layout.header.footer_digest = engram::Sha256Of(footer);
  layout.header.state = engram::kStateSealed;
  engram::SealHeader(layout.header);
  std::vector<uint8_t> file = engram::HeaderRegion(layout);
  file.insert(file.end(), data.begin(), data.end());
  file.insert(file.end(), footer.begin(), footer.end());
  Equal("packed_page.file bytes", static_cast<int64_t>(file.size()), Int(want.at("bytes")));
  Equal("packed_page.file header", HexOfBytes(std::span(file).first(332)),
        Text(want.at("header_first_332_bytes_hex")));
  Equal("packed_page.file header crc", HexOfBytes(std::span(file).subspan(4092, 4)),
        Text(want.at("header_crc32c_hex_le")));
  Equal("packed_page.file footer", HexOfBytes(std::span(footer).first(104)),
        Text(want.at("footer_first_104_bytes_hex")));
  Equal("packed_page.file footer sha256", Hex(layout.header.footer_digest),
        Text(want.at("footer_sha256")));
  Equal("packed_page.file sha256", Hex(engram::Sha256Of(file)), Text(want.at("sha256")));
  const auto parsed = engram::ParseHeaderRegion(file, file.size());
  Record("packed_page.file is accepted", parsed.ok() && engram::ParseFooter(*parsed, footer).ok(),
         std::string(parsed.status().message()));
}

int Main(const std::vector<std::string>& args) {
  std::string dir;
  std::string tokenizer;
  for (size_t i = 0; i + 1 < args.size(); i += 2) {
    if (args[i] == "--dir") dir = args[i + 1];
    if (args[i] == "--tokenizer") tokenizer = args[i + 1];
  }
  if (dir.empty() || args.size() % 2 != 0) {
    fprintf(stderr, "usage: golden_engram --dir DIR [--tokenizer FILE]\n");
    return kExitFailed;
  }
  return Checker(dir, tokenizer).Run();
}

}  // namespace
}  // namespace twinspark::golden

int main(int argc, char** argv) {
  return twinspark::golden::Main(std::vector<std::string>(argv + 1, argv + argc));
}
