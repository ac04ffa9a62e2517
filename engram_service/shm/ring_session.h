// One attached client: its socket, its shared memory, its requests. Reads records from the ring,
// checks every field (the client's memory is hostile until checked, so records are copied first),
// turns them into gather jobs and writes completions. Reactor thread only, except the heartbeat.
// Layout and trust: proto/row_ring.h.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engram_service/read/gather_engine.h"
#include "engram_service/shm/shared_memory.h"
#include "proto/row_ring.h"

namespace twinspark::engram {

struct SessionStats {
  uint64_t requests = 0;
  uint64_t tokens = 0;
  uint64_t refused = 0;  // bad, stale or over a bound
  uint64_t errors = 0;   // layers that failed or timed out
  uint64_t hints = 0;    // taken up
  uint64_t dropped_hints = 0;
};

class RingSession {
 public:
  // Makes the shared memory for an accepted handshake.
  static absl::StatusOr<std::unique_ptr<RingSession>> Create(uint64_t attach_epoch,
                                                             const TableSet& tables,
                                                             bool wants_hints,
                                                             const RowAttachRequest& request);

  uint64_t attach_epoch() const { return attach_epoch_; }
  const RowAttachReply& reply() const { return reply_; }
  std::array<int, 3> descriptors() const { return {control_.fd(), slabs_.fd(), doorbell_.get()}; }
  int doorbell() const { return doorbell_.get(); }
  size_t slab_bytes() const { return slabs_.size(); }

  // Takes what the ring holds, at most a batch. False: the client broke the protocol and must go.
  // `progress` is set when a record was taken.
  bool TakeRequests(GatherEngine& engine, SessionStats& stats, bool& progress);
  bool HasRequests() const;
  void SetSleeping(bool sleeping);
  // Thread-safe.
  void Beat(uint32_t service_state, bool overloaded);

 private:
  RingSession() = default;
  struct Accepted {
    RowRequest record;
    int64_t taken_ns;
    int64_t hashed_ns;
  };

  RowRingHeader& header() const { return *reinterpret_cast<RowRingHeader*>(control_.data()); }
  RowCompletion& line(uint32_t index) const {
    return reinterpret_cast<RowCompletion*>(control_.data() + header_copy_.lines_offset)[index];
  }
  bool TakeRecord(RowRequest& record);
  bool TakeOne(GatherEngine& engine, SessionStats& stats);
  // What a record asks for, checked and hashed; the status says what is wrong with it.
  absl::Status ParsePayload(const RowRequest& record,
                            std::span<const uint8_t> payload,
                            std::vector<Window>& windows) const;
  absl::Status ParseSlab(const RowRequest& record, GatherJob& job) const;
  void Report(const RowRequest& record, uint32_t state);
  void ReportLayer(const Accepted& accepted,
                   int layer_idx,
                   GatherStatus status,
                   LayerClassMeters& meters);
  void StartJob(GatherEngine& engine, SessionStats& stats, const Accepted& accepted, GatherJob job);
  bool DropOldestHint(GatherEngine& engine, SessionStats& stats);

  uint64_t attach_epoch_ = 0;
  const TableSet* tables_ = nullptr;
  RowRingHeader header_copy_{};  // what the service believes, whatever the client writes
  RowAttachReply reply_{};
  SharedMemory control_;
  SharedMemory slabs_;
  Fd doorbell_;
  uint64_t tail_ = 0;
  std::array<uint32_t, kNumClasses> active_{};  // requests in progress by class
  std::deque<uint64_t> hints_;  // jobs of hints in progress, oldest first; part of active_
  uint64_t last_job_ = 0;
  std::vector<bool> slab_busy_;
  std::vector<uint8_t> payload_;
  int refusals_logged_ = 0;
};

}  // namespace twinspark::engram
