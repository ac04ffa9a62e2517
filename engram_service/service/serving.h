// What a running service serves right now: an open table set, the data plane over it, and how it is
// known to be right (canary). Reload makes a new one; whoever holds the old one keeps it alive
// until it is done. Thread-safe after Open.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engram_service/io/make_reader.h"
#include "engram_service/read/row_cache.h"
#include "engram_service/read/table_set.h"
#include "engram_service/service/table_scrubber.h"
#include "engram_service/shm/row_server.h"
#include "engram_service/store/row_samples.h"

namespace twinspark::engram {

struct ServingOptions {
  TableSetOptions tables;
  RowServerOptions server;
  ReaderChoice reader;
  double cache_gib = -1;                // below 0: 2 for large tables, else none
  uint64_t scrub_bytes_per_second = 0;  // of packed tables while idle; 0 = no scrubbing
};

struct SelfTest {
  uint64_t rows = 0;
  int64_t micros = 0;
};

class Serving {
 public:
  // Opens tables and data plane, then checks boundary and sampled rows of every owned column and
  // runs the canary: what does not read now must not be found out by a request.
  static absl::StatusOr<std::shared_ptr<Serving>> Open(const ServingOptions& options);

  const TableSet& tables() const { return *tables_; }
  RowServer& server() const { return *server_; }
  // What is worse than it should be: O_DIRECT or io_uring refused. Empty when all is well.
  const std::string& compromise() const { return compromise_; }
  uint64_t epoch() const { return epoch_; }
  const Sha256Digest& expected_canary() const { return canary_; }
  // Of the whole table of a layer, as far as this node knows it: what the ranks compare.
  const RowSamples& samples(int layer_idx) const {
    return samples_[static_cast<size_t>(layer_idx)];
  }
  const SelfTest& self_test() const { return self_test_; }
  ScrubStats scrub() const { return scrubber_->stats(); }

  // Rows of the canary tokens through the whole path, past the cache, as one digest.
  absl::StatusOr<Sha256Digest> RunCanary() const;

 private:
  Serving() = default;
  absl::Status WaitUntilSettled() const;
  absl::Status CheckRows();
  absl::StatusOr<std::unique_ptr<BlockReader>> MakeTableReader(const ReaderChoice& choice);
  absl::StatusOr<std::unique_ptr<RowCache>> MakeCache(double gib) const;

  std::unique_ptr<TableSet> tables_;
  std::unique_ptr<RowServer> server_;        // after tables_: goes first
  std::unique_ptr<TableScrubber> scrubber_;  // before both
  bool large_ = false;
  std::string compromise_;
  uint64_t epoch_ = 0;
  Sha256Digest canary_{};
  std::vector<RowSamples> samples_;  // by layer
  SelfTest self_test_;
};

}  // namespace twinspark::engram
