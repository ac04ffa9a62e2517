// From the bytes of an op to plain structs. Every bound of protocol specification 9 that needs no
// state is checked here, where the message enters: list lengths, slots, k, positions, sampling
// values, deadlines. What this build does not do is refused by name with UNIMPLEMENTED. Pure; any
// thread.
#pragma once

#include <string>

#include "shard_worker/runtime/worker_backend.h"
#include "shard_worker/runtime/worker_op.h"

namespace twinspark {

// What bounds apply in this epoch.
struct OpBounds {
  GroupLimits granted;
  int vocab_size = 0;
  int max_drafts = 0;
};

// Never fails: what is wrong is in WorkerOp::refused (INVALID_ARGUMENT, or UNIMPLEMENTED).
WorkerOp ReadOp(std::string bytes, const OpBounds& bounds);

}  // namespace twinspark
