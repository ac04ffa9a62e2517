// From plain structs to the messages that leave a worker: results, heartbeats, status. Pure; any
// thread.
#pragma once

#include "proto/shard_worker.pb.h"
#include "shard_worker/runtime/worker_core.h"
#include "shard_worker/runtime/worker_op.h"

namespace twinspark {

// Rank 0 sends everything; the others digest, status and total time (`bulky` false).
void WriteOpResult(const OpOutcome& outcome, bool bulky, proto::OpResult* wire);
void WriteHeartbeat(const Heartbeat& heartbeat, proto::WorkerHeartbeat* wire);
void WriteProgress(WorkerState state, const LoadState& load, proto::ConfigureProgress* wire);
void WriteReady(const ReadyReport& report, proto::ConfigureReady* wire);
void WriteStatus(const WorkerStatus& status, proto::StatusReply* wire);
void WriteLimits(const GroupLimits& limits, proto::Limits* wire);

proto::WorkerState ToWire(WorkerState state);

}  // namespace twinspark
