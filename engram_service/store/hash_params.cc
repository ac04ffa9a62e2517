// Derivation of the hashing constants. The generator follows engram.md 1.4: a seed-expansion pool
// of four 32-bit words, then a 128-bit linear congruential generator with xor-shift-rotate output,
// then an unbiased bounded draw.
#include "engram_service/store/hash_params.h"

#include <algorithm>
#include <array>
#include <bit>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

#include "boost/json.hpp"
#include "common/status_macros.h"

namespace twinspark::engram {
namespace {

using Uint128 = unsigned __int128;

// Expands a 32-bit seed into four 64-bit words.
std::array<uint64_t, 4> ExpandSeed(uint64_t seed) {
  uint32_t hash = 0x43b0d7e5;
  const auto mix = [&hash](uint32_t value) {
    value ^= hash;
    hash *= 0x931e8875;
    value *= hash;
    return value ^ (value >> 16);
  };
  const uint32_t words[4] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32), 0, 0};
  uint32_t pool[4];
  for (int i = 0; i < 4; ++i)
    pool[i] = mix(words[i]);
  for (int source = 0; source < 4; ++source) {
    for (int dest = 0; dest < 4; ++dest) {
      if (source == dest) continue;
      const uint32_t joined = pool[dest] * 0xca01f9dd - mix(pool[source]) * 0x4973f715;
      pool[dest] = joined ^ (joined >> 16);
    }
  }
  uint32_t out[8];
  hash = 0x8b51f9dd;
  for (int i = 0; i < 8; ++i) {
    uint32_t value = pool[i % 4] ^ hash;
    hash *= 0x58f38ded;
    value *= hash;
    out[i] = value ^ (value >> 16);
  }
  std::array<uint64_t, 4> result;
  for (size_t i = 0; i < 4; ++i) {
    result[i] = out[2 * i] | (static_cast<uint64_t>(out[2 * i + 1]) << 32);
  }
  return result;
}

class Generator {
 public:
  explicit Generator(uint64_t seed) {
    const auto words = ExpandSeed(seed);
    const Uint128 initial = (static_cast<Uint128>(words[0]) << 64) | words[1];
    increment_ = (((static_cast<Uint128>(words[2]) << 64) | words[3]) << 1) | 1;
    Step();
    state_ += initial;
    Step();
  }

  uint64_t Next() {
    Step();
    const uint64_t high = static_cast<uint64_t>(state_ >> 64);
    const uint64_t low = static_cast<uint64_t>(state_);
    return std::rotr(high ^ low, static_cast<int>(high >> 58));
  }

  // Uniform in [0, bound), bound > 2^32.
  uint64_t Bounded(uint64_t bound) {
    Uint128 product = static_cast<Uint128>(Next()) * bound;
    if (static_cast<uint64_t>(product) < bound) {
      const uint64_t threshold = (0 - bound) % bound;
      while (static_cast<uint64_t>(product) < threshold) {
        product = static_cast<Uint128>(Next()) * bound;
      }
    }
    return static_cast<uint64_t>(product >> 64);
  }

  Uint128 state() const { return state_; }
  Uint128 increment() const { return increment_; }

 private:
  void Step() {
    constexpr Uint128 kMultiplier =
        (static_cast<Uint128>(0x2360ED051FC65DA4) << 64) | 0x4385DF649FCCF645;
    state_ = state_ * kMultiplier + increment_;
  }

  Uint128 state_ = 0;
  Uint128 increment_ = 0;
};

bool IsPrime(uint64_t n) {
  if (n < 2) return false;
  for (uint64_t d = 2; d * d <= n; ++d) {
    if (n % d == 0) return false;
  }
  return true;
}

absl::Status CheckShape(const EngramShape& shape) {
  const auto refuse = [](const char* key, auto value, const char* expected) {
    return absl::InvalidArgumentError(absl::StrCat(key, " is ", value, "; expected ", expected));
  };
  if (shape.layer_ids.empty() || shape.layer_ids.size() > 4) {
    return refuse("number of engram_layer_ids", shape.layer_ids.size(), "1 to 4");
  }
  if (shape.max_ngram_size < 2 || shape.max_ngram_size > kMaxNgram) {
    return refuse("engram_max_ngram_size", shape.max_ngram_size, "2 to 4");
  }
  if (shape.num_heads < 1 || shape.num_columns() > 64) {
    return refuse("engram_n_heads", shape.num_heads, "at most 64 columns in all");
  }
  if (shape.head_dim < 32 || shape.head_dim > 4096 || shape.head_dim % 32 != 0) {
    return refuse("engram_head_dim", shape.head_dim, "a multiple of 32 up to 4096");
  }
  if (shape.bucket_start < 2 || shape.bucket_start > 64000000) {
    return refuse("engram_vocab_size", shape.bucket_start, "2 to 64,000,000");
  }
  if (shape.num_classes < 2 || MultiplierBound(shape.num_classes) <= (uint64_t{1} << 32)) {
    return refuse("engram_compressed_vocab_size", shape.num_classes, "2 to 2^30");
  }
  if (!shape.num_rows.empty() && shape.num_rows.size() != shape.layer_ids.size()) {
    return refuse("number of engram_num_embeddings", shape.num_rows.size(),
                  "one per engram_layer_ids entry");
  }
  return absl::OkStatus();
}

}  // namespace

EngramShape ShapeFromConfig(const ModelConfig& config) {
  EngramShape shape;
  shape.layer_ids = config.engram_layer_ids;
  for (const int64_t rows : config.engram_num_embeddings) {
    shape.num_rows.push_back(static_cast<uint64_t>(rows));
  }
  shape.max_ngram_size = config.engram_max_ngram_size;
  shape.num_heads = config.engram_num_heads;
  shape.head_dim = config.engram_head_dim;
  shape.bucket_start = static_cast<uint64_t>(config.engram_vocab_size);
  shape.num_classes = static_cast<uint64_t>(config.engram_compressed_vocab_size);
  shape.pad_token_id = config.engram_pad_token_id;
  shape.vocab_size = config.vocab_size;
  return shape;
}

uint64_t MultiplierBound(uint64_t num_classes) {
  return ((uint64_t{1} << 63) - 1) / num_classes / 2;
}

std::vector<uint64_t> DrawMultipliers(int layer_id, int count, uint64_t bound) {
  Generator generator(uint64_t{10007} * static_cast<uint64_t>(layer_id));
  std::vector<uint64_t> multipliers;
  for (int i = 0; i < count; ++i)
    multipliers.push_back(2 * generator.Bounded(bound) + 1);
  return multipliers;
}

GeneratorTrace TraceGenerator(uint64_t seed, int count, uint64_t bound) {
  const auto hex = [](Uint128 value) {
    return absl::StrFormat("%016x%016x", static_cast<uint64_t>(value >> 64),
                           static_cast<uint64_t>(value));
  };
  GeneratorTrace trace;
  const auto words = ExpandSeed(seed);
  trace.seed_words.assign(words.begin(), words.end());
  Generator raw(seed);
  trace.state_hex = hex(raw.state());
  trace.increment_hex = hex(raw.increment());
  Generator bounded(seed);
  for (int i = 0; i < count; ++i) {
    trace.raw_outputs.push_back(raw.Next());
    trace.draws.push_back(bounded.Bounded(bound));
  }
  return trace;
}

absl::StatusOr<std::vector<LayerHash>> DeriveLayerHashes(const EngramShape& shape) {
  RETURN_IF_ERROR(CheckShape(shape));
  const uint64_t bound = MultiplierBound(shape.num_classes);
  std::vector<LayerHash> layers;
  uint64_t candidate = shape.bucket_start;
  for (int i = 0; i < shape.num_layers(); ++i) {
    LayerHash layer;
    layer.layer_id = shape.layer_ids[static_cast<size_t>(i)];
    // Draws depend on their number: the generator always makes the four of the full window.
    layer.multipliers = DrawMultipliers(layer.layer_id, shape.max_ngram_size, bound);
    const uint64_t largest = *std::max_element(layer.multipliers.begin(), layer.multipliers.end());
    if (static_cast<Uint128>(largest) * (shape.num_classes - 1) >> 63 != 0) {
      return absl::InvalidArgumentError(absl::StrCat("engram_compressed_vocab_size ",
                                                     shape.num_classes,
                                                     ": a hash product would not fit in 63 bits"));
    }
    for (int column = 0; column < shape.num_columns(); ++column) {
      while (!IsPrime(candidate))
        ++candidate;
      layer.primes.push_back(static_cast<uint32_t>(candidate++));
      layer.offsets.push_back(layer.num_rows);
      layer.num_rows += layer.primes.back();
    }
    if (!shape.num_rows.empty() && layer.num_rows != shape.num_rows[static_cast<size_t>(i)]) {
      return absl::InvalidArgumentError(absl::StrCat(
          "engram_num_embeddings of layer ", layer.layer_id, " is ",
          shape.num_rows[static_cast<size_t>(i)], "; the primes from engram_vocab_size ",
          shape.bucket_start, " add up to ", layer.num_rows));
    }
    layers.push_back(std::move(layer));
  }
  return layers;
}

Sha256Digest HashParamsDigest(std::span<const LayerHash> layers) {
  Sha256 hash;
  for (const LayerHash& layer : layers) {
    hash.UpdateU32(static_cast<uint32_t>(layer.layer_id));
    for (const uint64_t multiplier : layer.multipliers)
      hash.UpdateU64(multiplier);
    for (const uint32_t prime : layer.primes)
      hash.UpdateU32(prime);
    for (const uint64_t offset : layer.offsets)
      hash.UpdateU32(static_cast<uint32_t>(offset));
  }
  return hash.Finish();
}

namespace {

// Compares json[key][layer] with `expected`; json values are integers up to 2^63.
template <typename T>
absl::Status CompareList(const boost::json::object& object,
                         const char* key,
                         size_t layer_idx,
                         const std::vector<T>& expected,
                         const std::string& origin) {
  const boost::json::value* lists = object.if_contains(key);
  if (lists == nullptr) return absl::OkStatus();
  const auto* outer = lists->if_array();
  const auto* list =
      outer != nullptr && layer_idx < outer->size() ? (*outer)[layer_idx].if_array() : nullptr;
  bool equal = list != nullptr && list->size() == expected.size();
  for (size_t i = 0; equal && i < expected.size(); ++i) {
    boost::system::error_code error;
    equal = (*list)[i].to_number<uint64_t>(error) == expected[i] && !error;
  }
  if (equal) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(origin, ": ", key, " of layer index ", layer_idx,
                                          " differ from those that config.json implies"));
}

absl::Status CheckRank(int rank, int world) {
  if (world < 1) return absl::InvalidArgumentError(absl::StrCat("world ", world, " is below 1"));
  if (rank >= 0 && rank < world) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("rank ", rank, " is not in 0..", world - 1, " (world ", world, ")"));
}

}  // namespace

absl::Status CheckConstants(const EngramShape& shape,
                            std::span<const LayerHash> layers,
                            const std::string& json,
                            const std::string& origin) {
  boost::system::error_code error;
  const boost::json::value value = boost::json::parse(json, error);
  if (error || !value.is_object()) {
    return absl::DataLossError(absl::StrCat(origin, " is not a JSON object"));
  }
  const boost::json::object& object = value.get_object();
  std::vector<uint64_t> rows;
  for (size_t i = 0; i < layers.size(); ++i) {
    RETURN_IF_ERROR(CompareList(object, "multipliers", i, layers[i].multipliers, origin));
    RETURN_IF_ERROR(CompareList(object, "primes", i, layers[i].primes, origin));
    RETURN_IF_ERROR(CompareList(object, "offsets", i, layers[i].offsets, origin));
    rows.push_back(layers[i].num_rows);
  }
  const auto expect = [&](const char* key, uint64_t want) -> absl::Status {
    const boost::json::value* found = object.if_contains(key);
    if (found == nullptr) return absl::OkStatus();
    boost::system::error_code ignored;
    if (found->to_number<uint64_t>(ignored) == want && !ignored) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat(origin, ": ", key, " differs from config.json, which gives ", want));
  };
  RETURN_IF_ERROR(expect("multiplier_bound", MultiplierBound(shape.num_classes)));
  RETURN_IF_ERROR(expect("compressed_vocab_size", shape.num_classes));
  RETURN_IF_ERROR(expect("bucket_start", shape.bucket_start));
  if (const auto* found = object.if_contains("rows_per_layer")) {
    const boost::json::array wrapped{*found};
    RETURN_IF_ERROR(CompareList(boost::json::object{{"rows_per_layer", wrapped}}, "rows_per_layer",
                                0, rows, origin));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int>> BalancedColumns(const EngramShape& shape, int rank, int world) {
  RETURN_IF_ERROR(CheckRank(rank, world));
  if (shape.num_heads % world != 0) {
    return absl::InvalidArgumentError(absl::StrCat("world ", world, " does not divide the ",
                                                   shape.num_heads, " hash heads of this model"));
  }
  const int share = shape.num_heads / world;
  std::vector<int> columns;
  for (int column = 0; column < shape.num_columns(); ++column) {
    if (column % shape.num_heads / share == rank) columns.push_back(column);
  }
  return columns;
}

absl::StatusOr<std::vector<int>> ContiguousColumns(const EngramShape& shape, int rank, int world) {
  RETURN_IF_ERROR(CheckRank(rank, world));
  const int share = (shape.num_columns() + world - 1) / world;
  std::vector<int> columns;
  for (int column = rank * share; column < std::min((rank + 1) * share, shape.num_columns());
       ++column) {
    columns.push_back(column);
  }
  return columns;
}

}  // namespace twinspark::engram
