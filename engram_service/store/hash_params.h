// The constants of n-gram hashing, derived from the model's configuration: multipliers by a seeded
// generator, one prime per (order, head) column, offsets as running sums (engram.md 1.4, 1.5).
// A configuration whose primes do not add up to its declared row counts is refused.
// Plain data. Callers: hasher, table readers (column ranges), packer, golden_engram.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "common/model_config.h"
#include "engram_service/store/sha256.h"

namespace twinspark::engram {

inline constexpr int kMaxNgram =
    4;  // tokens of the longest n-gram that windows and cache keys hold

// The Engram keys of config.json.
struct EngramShape {
  std::vector<int> layer_ids;
  std::vector<uint64_t> num_rows;  // per layer, as declared; empty = not checked
  int max_ngram_size = 0;          // orders 2..max_ngram_size
  int num_heads = 0;               // per order
  int head_dim = 0;                // weights of a row
  uint64_t bucket_start = 0;       // engram_vocab_size: where the prime search starts
  uint64_t num_classes = 0;        // engram_compressed_vocab_size
  int32_t pad_token_id = 0;
  int32_t vocab_size = 0;

  int num_layers() const { return static_cast<int>(layer_ids.size()); }
  int num_columns() const { return (max_ngram_size - 1) * num_heads; }
  int row_weight_bytes() const { return head_dim; }
  int row_scale_bytes() const { return head_dim / 32; }
};

EngramShape ShapeFromConfig(const ModelConfig& config);

// Column c = (order - 2) * num_heads + head owns rows [offsets[c], offsets[c] + primes[c]).
struct LayerHash {
  int layer_id = 0;
  std::vector<uint64_t> multipliers;  // by lookback 0..max_ngram_size-1
  std::vector<uint32_t> primes;       // by column
  std::vector<uint64_t> offsets;      // by column
  uint64_t num_rows = 0;              // sum of the primes
};

absl::StatusOr<std::vector<LayerHash>> DeriveLayerHashes(const EngramShape& shape);

// Largest draw of the generator plus one: floor(floor((2^63 - 1) / num_classes) / 2).
uint64_t MultiplierBound(uint64_t num_classes);

// The four odd multipliers of one layer (engram.md 1.4).
std::vector<uint64_t> DrawMultipliers(int layer_id, int count, uint64_t bound);

// What the generator holds and gives for a seed, for comparison with published traces.
struct GeneratorTrace {
  std::vector<uint64_t> seed_words;   // four
  std::string state_hex;              // 128 bits after seeding
  std::string increment_hex;          // 128 bits
  std::vector<uint64_t> raw_outputs;  // the first `count`
  std::vector<uint64_t> draws;        // below `bound`, from a fresh generator
};
GeneratorTrace TraceGenerator(uint64_t seed, int count, uint64_t bound);

// SHA-256 over, per layer: u32 layer id, i64 multipliers, u32 primes, u32 offsets.
Sha256Digest HashParamsDigest(std::span<const LayerHash> layers);

// Compares with engram_constants.json text (multipliers, primes, offsets, row counts); the error
// names the first key that differs.
absl::Status CheckConstants(const EngramShape& shape,
                            std::span<const LayerHash> layers,
                            const std::string& json,
                            const std::string& origin);

// The columns that `rank` of `world` owns, ascending: its share of the heads of every order
// (engram.md 1.10), so that no rank gets only the orders that repeat least.
absl::StatusOr<std::vector<int>> BalancedColumns(const EngramShape& shape, int rank, int world);

// The kit's split, ceil(columns / world) consecutive columns; only for reading its packed files.
absl::StatusOr<std::vector<int>> ContiguousColumns(const EngramShape& shape, int rank, int world);

}  // namespace twinspark::engram
