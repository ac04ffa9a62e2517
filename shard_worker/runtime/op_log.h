// A recorded op log: the ops of one epoch as one rank got them, with the digest of each result.
// replay_ops (tests/replay) runs such a file against workers without a gateway and says where
// digests part.
//
// File: magic "TSOPLOG1", then records { u8 kind, u32 size, bytes }, little endian:
//   kind 1  group: lines KEY=VALUE (epoch, rank, world, model_dir, engram_dir, numerics, limits)
//   kind 2  op: the bytes that the gateway serialised
//   kind 3  result of the op before: u64 op id, u64 digest, u32 status code
// A file may end in the middle of a record (the process died): what came before counts.
#pragma once

#include <cstdint>
#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "shard_worker/runtime/worker_backend.h"
#include "shard_worker/runtime/worker_op.h"

namespace twinspark {

// Compute thread only. A write that fails is logged once and ends the recording.
class OpLogWriter {
 public:
  // Files are DIR/epoch-E-rank-R.oplog, one per epoch.
  explicit OpLogWriter(std::string dir) : dir_(std::move(dir)) {}
  ~OpLogWriter();
  OpLogWriter(const OpLogWriter&) = delete;
  OpLogWriter& operator=(const OpLogWriter&) = delete;

  void Write(const GroupConfig& group, const WorkerOp& op, const OpOutcome& outcome);

 private:
  void OpenFor(const GroupConfig& group);
  void Record(uint8_t kind, const std::string& bytes);

  const std::string dir_;
  uint64_t epoch_ = 0;
  std::FILE* file_ = nullptr;
};

struct RecordedOp {
  std::string bytes;
  bool has_result = false;
  uint64_t op_id = 0;
  uint64_t digest = 0;
  uint32_t status_code = 0;
};

struct RecordedLog {
  GroupConfig group;
  std::vector<RecordedOp> ops;
};

absl::StatusOr<RecordedLog> ReadOpLog(const std::string& path);

}  // namespace twinspark
