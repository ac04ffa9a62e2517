// The worker's side of the row ring: attaches to the row service of its node over a Unix socket,
// maps what it is given, submits requests and waits for rows, watching that the service lives.
// Every wait is bounded; after the first failure the attachment is over and every call says why
// (the worker attaches anew at its next Configure). Step thread only, except Probe. Layout:
// proto/row_ring.h.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "proto/row_ring.h"
#include "shard_worker/model/row_source.h"

namespace twinspark {

struct RingClientLimits {
  int64_t row_wait_ns = 0;   // from submission; 0 = limits::kRowWaitMsMax
  int64_t heartbeat_ns = 0;  // longest stall of the service's heartbeat; 0 = 500 ms x time scale
  int64_t spin_ns = 20'000;  // busy wait before sleeping
};

// What one watching thread remembers of the service's heartbeat: last value, when it was first
// seen, how often it was looked at since.
struct AliveWatch {
  uint64_t beat = 0;
  int64_t beat_ns = 0;
  int looks = 0;
};

class RingClient {
 public:
  // `request` without magic and version. kUnavailable when nobody listens there,
  // kFailedPrecondition with the service's words when it refuses.
  static absl::StatusOr<std::unique_ptr<RingClient>> Attach(const std::string& socket_name,
                                                            RowAttachRequest request,
                                                            const RingClientLimits& limits);
  ~RingClient();
  RingClient(const RingClient&) = delete;
  RingClient& operator=(const RingClient&) = delete;

  const RowRingHeader& header() const { return header_copy_; }
  int max_tokens() const { return static_cast<int>(header_copy_.large_slab_tokens); }

  // Starts reading the rows of all layers. Replaces the request before.
  absl::Status Submit(std::span<const RowRange> ranges, RowClass row_class);
  // A hint that these rows will be wanted. False when it was not given: the service has no use for
  // hints, they are more tokens than a slab holds, or the ring would be more than half full.
  bool Hint(std::span<const RowRange> ranges, RowClass row_class);
  // Rows of one layer of the last request; they hold until their slab is reused, which is not
  // before the next Submit.
  absl::StatusOr<EngramRows> Wait(int layer_idx);

  // Whether the service still lives: socket open, heart beating, tables not failed. Any thread,
  // with a watch of its own; the attachment itself is left to the step thread. The heart stands
  // still when `looks_min` looks in a row and the heartbeat limit say so.
  absl::Status Probe(AliveWatch& watch, int looks_min) const;

  // Service's view of the last completed request, nanoseconds.
  struct Timings {
    uint64_t queue_ns = 0;
    uint64_t hash_ns = 0;
    uint64_t read_ns = 0;
  };
  Timings last_timings() const { return timings_; }
  // State word of the service's header.
  uint32_t service_state() const;
  // Whether the service says that bulk requests wait too long.
  bool service_overloaded() const;

 private:
  struct Mapping;
  RingClient();

  absl::Status Map(const RowAttachReply& reply, const RingClientLimits& limits);
  absl::Status CheckHeader() const;
  absl::Status Push(RowRequest record, std::span<const RowRange> ranges);
  absl::StatusOr<uint32_t> TakeSlab(uint32_t num_tokens);
  absl::Status CheckAlive();
  absl::Status End(absl::Status why);
  RowCompletion& line(uint32_t index) const;
  RowRingHeader& shared_header() const;

  std::unique_ptr<Mapping> mapping_;
  RowRingHeader header_copy_{};
  RingClientLimits limits_;
  absl::Status ended_;
  uint64_t next_id_ = 1;
  uint64_t head_ = 0;
  // The last request.
  uint64_t id_ = 0;
  uint32_t slab_ = 0;
  uint32_t num_tokens_ = 0;
  int64_t submitted_ns_ = 0;
  std::vector<bool> slab_used_;  // its line is only meaningful after a first use
  AliveWatch watch_;
  Timings timings_;
};

}  // namespace twinspark
