// The gRPC calls a worker makes to its row service, with plain structs outside. Generated types
// stay in the .cc file. Thread-safe.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "shard_worker/model/row_source.h"

namespace twinspark {

struct EngramHello {
  struct Layer {
    int layer_id = 0;
    uint64_t num_rows = 0;
    std::vector<int> columns;
    std::string content_digest;
    std::vector<std::string> files;  // what they were when the service opened them, for errors
    // By column of the whole table: digest of sampled rows, empty where the service knows none.
    std::vector<std::string> row_samples;
  };
  std::string build_id;
  uint64_t service_epoch = 0;
  std::string attach_socket;
  std::vector<Layer> layers;
  int row_weight_bytes = 0;
  int row_scale_bytes = 0;
  int rank = 0;
  int world = 0;
  int max_ngram_size = 0;
  int vocab_size = 0;
  std::string model_digest;
  std::string hash_digest;  // of token map and hash parameters, in hex: equal on all ranks
  std::string tier;
  std::string back_end;
};

struct RowBytes {
  std::string values;
  std::string scales;
};

class EngramRpc {
 public:
  explicit EngramRpc(const std::string& endpoint);
  ~EngramRpc();

  absl::StatusOr<EngramHello> Hello(const std::string& client) const;
  // Digest of the canary's rows as the drive has them now. DATA_LOSS when they are not what they
  // were when the service opened its tables.
  absl::StatusOr<std::string> Canary() const;
  // Rows of all layers, at most kMaxGatherTokens tokens in a call; larger requests are split.
  absl::StatusOr<std::vector<RowBytes>> Gather(std::span<const RowRange> ranges,
                                               const EngramHello& hello) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace twinspark
