// Ranks as threads of one process: golden programs, tests, `--tp 2` without sockets.
#pragma once

#include <memory>
#include <vector>

#include "shard_worker/parallel/communicator.h"

namespace twinspark {

// One communicator per rank, connected to each other. `timeout_ms` bounds every wait for a peer.
// Each may be used by one thread; the group lives as long as any of them.
std::vector<std::unique_ptr<Communicator>> MakeLocalGroup(int world, int64_t timeout_ms);

}  // namespace twinspark
