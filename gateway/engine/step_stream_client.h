// One rank's side of the log: the bidirectional stream that carries serialised ops and heartbeats
// to a worker and its results back. EncodeOp makes the bytes that every rank gets, once per op.
// Opened by WorkerClient, owned by WorkerGroup. Thread-safe; events arrive on the
// thread of the CompletionLoop.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"

#include "gateway/engine/worker_types.h"
#include "gateway/scheduler/step_plan.h"

namespace twinspark::gateway {

// The bytes of proto.Op.
std::string EncodeOp(const StepPlan& plan);

// Must not block, nor end the stream. After OnClosed nothing more is called.
class StepStreamEvents {
 public:
  virtual ~StepStreamEvents() = default;
  virtual void OnAccepted(int rank) = 0;
  virtual void OnHeartbeat(int rank) = 0;
  virtual void OnResult(int rank, RankResult result) = 0;
  virtual void OnClosed(int rank, const absl::Status& status) = 0;
};

class StepStream {
 public:
  virtual ~StepStream() = default;  // ends the stream; no event is called any more
  virtual void SendOp(const std::string& op_bytes) = 0;
  // Nothing when an op was sent since the last one: that was a sign of life too.
  virtual void SendHeartbeat(uint64_t sequence) = 0;
  // After OnResult the stream is not read on until something is sent on it or this is called: then
  // the acknowledgement of the result (an HTTP/2 window update) leaves with the next op instead of
  // in a packet of its own.
  virtual void ReadOn() = 0;
  // Ends the stream: the worker goes back to IDLE. OnClosed follows.
  virtual void Close() = 0;
};

}  // namespace twinspark::gateway
