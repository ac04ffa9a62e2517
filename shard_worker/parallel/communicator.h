// What tensor parallel ranks exchange. Three calls, all collective: every rank makes the same calls
// in the same order with the same sizes. Sums are taken in one fixed order (lower rank first), so
// all ranks hold the same bits afterwards. Implementations: local_communicator.h (threads of one
// process), tcp_communicator.h (processes, hosts). NCCL joins behind the same interface.
//
// Errors: UNAVAILABLE (peer gone, aborted), DEADLINE_EXCEEDED (peer silent longer than the call's
// limit), INTERNAL (ranks disagree about operation, sequence or size). After the first error the
// communicator is broken for good and every later call fails at once: nothing is retried in an
// epoch. Threading: one thread calls the collectives; Abort may come from any thread.
#pragma once

#include <cstddef>
#include <span>

#include "absl/status/status.h"

namespace twinspark {

class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int world() const = 0;

  // values[i] := sum over the ranks of their values[i], in f32, ((r0 + r1) + r2) + ...
  virtual absl::Status AllReduceSum(std::span<float> values) = 0;

  // all = the ranks' `mine` one after another in rank order; all.size() == world * mine.size().
  // `mine` may be this rank's place within `all`.
  virtual absl::Status AllGather(std::span<const std::byte> mine, std::span<std::byte> all) = 0;

  // Returns when every rank has called it.
  virtual absl::Status Barrier() = 0;

  // Makes a call in progress and every later one fail with UNAVAILABLE, on the peers too.
  virtual void Abort() = 0;
};

}  // namespace twinspark
