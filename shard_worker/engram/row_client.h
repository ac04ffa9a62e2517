// The row source of a serving worker: the row service of this node. Says Hello over gRPC, compares
// what the service has with this worker's model, attaches to its shared memory and gets every row
// from there. A service on another host has no shared memory: then, and only then, rows come as
// bytes over gRPC, which the log and the worker's Status say (`transport`). One object per
// Configure: a new epoch makes a new one, so a restarted service is used again without restarting
// the worker. Step thread only, except state() and CheckAlive(). Spec: protocol.md 7.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "common/model_config.h"
#include "shard_worker/model/row_source.h"

namespace twinspark {

// What the rows of a service are, as far as it can tell: two services, or one at two times, whose
// contents differ give different rows for the same tokens.
struct RowContent {
  std::string model_digest;
  std::vector<std::string> layer_digests;  // EngramHello::Layer::content_digest
  std::string canary;
  std::vector<std::vector<std::string>> layer_files;  // EngramHello::Layer::files; not compared
  std::vector<std::vector<std::string>> row_samples;  // by layer and column; for the other ranks

  bool operator==(const RowContent& other) const {
    return model_digest == other.model_digest && layer_digests == other.layer_digests &&
           canary == other.canary;
  }
};

struct RowClientOptions {
  std::string endpoint;  // host:port of this rank's row service
  int rank = 0;
  int world = 1;
  // Granted limits: rows of a decode round and of the largest step.
  int max_round_rows = 48;
  int max_chunk_rows = 2048;
  // Of the last epoch: anything else is refused (kFailedPrecondition). Empty = the first epoch.
  std::optional<RowContent> expected = std::nullopt;
};

// What the worker's Status reports about its row service.
struct RowClientState {
  std::string transport;  // "shm" or "grpc"
  std::string tier;       // "native", "packed" or "compat"
  std::string back_end;
  std::string hash_digest;  // of token map and hash parameters, in hex: equal on all ranks
  uint64_t service_epoch = 0;
  uint64_t requests = 0;
  uint64_t tokens = 0;
  uint64_t late = 0;  // requests whose rows were not there when the model wanted them
  uint64_t wait_us_total = 0;
  uint64_t wait_us_max = 0;
  uint64_t hints = 0;  // given to the service
  uint64_t errors = 0;
  bool overloaded = false;  // the service says that bulk requests wait too long there
  std::string last_error;
};

class RowClient : public RowSource {
 public:
  // kUnavailable: nobody there (yet); kFailedPrecondition: it serves something else (the text names
  // both values); kInvalidArgument: limits it refuses.
  static absl::StatusOr<std::unique_ptr<RowClient>> Connect(const ModelConfig& config,
                                                            const RowClientOptions& options);
  ~RowClient() override;

  absl::Status Request(std::span<const RowRange> ranges, RowClass row_class) override;
  // Told to a service that has a use for it and whose ring is not half full; else forgotten.
  void Hint(std::span<const RowRange> ranges, RowClass row_class) override;
  absl::StatusOr<EngramRows> Rows(int module_idx) override;

  RowClientState state() const;
  const RowContent& content() const;
  // Whether the row service still lives, for the worker that has nothing to do: call it every 100
  // ms. A service that stands still is noticed after ten looks. Any one thread.
  absl::Status CheckAlive();

 private:
  struct Transport;
  RowClient();
  absl::Status Note(absl::Status status);

  std::unique_ptr<Transport> transport_;
  mutable std::mutex mutex_;
  RowClientState state_;
};

}  // namespace twinspark
