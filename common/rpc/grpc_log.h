// gRPC writes lines of its own to stderr, also for what we report in one line (a taken port, a peer
// that is not there yet). They become debug lines of our log.
#pragma once

namespace twinspark {

// Idempotent; server and channel call it.
void QuietGrpcLog();

}  // namespace twinspark
