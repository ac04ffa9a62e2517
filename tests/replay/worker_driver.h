// Shard workers without a gateway: opens an epoch on a group of workers and runs ops on all ranks,
// one after another. For replay_ops and for the tests of real workers; decides nothing about what
// the ops are. One thread calls it; heartbeats go out from another.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "proto/shard_worker.pb.h"

namespace twinspark {

struct DriverGroup {
  std::vector<std::string> workers;           // host:port, in rank order
  std::vector<std::string> engram_endpoints;  // in rank order; empty strings where there is none
  std::string model_dir;
  std::string engram_dir;
  std::string simd_target;
  bool f32_numerics = false;
  proto::Limits limits;
};

class WorkerDriver {
 public:
  // Hello, PrepareGroup, Configure, Steps on every rank. The epoch is above every earlier one.
  static absl::StatusOr<std::unique_ptr<WorkerDriver>> Open(const DriverGroup& group);
  ~WorkerDriver();

  // Of rank 0.
  const proto::ConfigureReady& ready() const;
  uint64_t epoch() const;

  // The same bytes to every rank; results in rank order. An error when a stream ends instead.
  absl::StatusOr<std::vector<proto::OpResult>> RunOp(const std::string& bytes);
  // As above, with op_id and deadline filled in.
  absl::StatusOr<std::vector<proto::OpResult>> RunOp(proto::Op op);

  // Half-closes the streams and waits for their ends; the first error.
  absl::Status Close();

 private:
  struct Rank;
  WorkerDriver();

  std::vector<std::unique_ptr<Rank>> ranks_;
  uint64_t epoch_ = 0;
  uint64_t next_op_id_ = 1;
};

}  // namespace twinspark
