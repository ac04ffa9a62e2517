// The open Steps streams of one epoch, one per rank: sends the same op bytes to all, passes results
// and losses on to the engine, remembers when each rank was last heard. Made by EpochManager, used
// by EngineLoop (ops) and WorkerMonitor (heartbeats, silence). Thread-safe. Its destruction ends
// the streams and must not happen inside one of their events: those three hold the only references.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"

#include "common/clock.h"
#include "gateway/engine/engine_inbox.h"
#include "gateway/engine/step_stream_client.h"

namespace twinspark::gateway {

class WorkerClient;

class WorkerGroup : private StepStreamEvents {
 public:
  WorkerGroup(uint64_t epoch, int world, const Clock& clock, EngineInbox& inbox);
  ~WorkerGroup() override;
  WorkerGroup(const WorkerGroup&) = delete;
  WorkerGroup& operator=(const WorkerGroup&) = delete;

  // Opens the stream of every rank and waits until all have accepted the epoch. The error names
  // the rank that did not.
  absl::Status Open(const std::vector<std::unique_ptr<WorkerClient>>& clients,
                    const std::string& config_digest,
                    const std::string& weights_digest,
                    int64_t timeout_ms);

  // From here on a lost rank is told to the engine (also one that was lost since Open).
  void StartServing();

  // Ends every stream; the engine hears nothing more of this group.
  void Close();

  void SendOp(const std::string& op_bytes);
  void SendHeartbeats();
  // Reads every stream on. What is not read on by this is when the next op or heartbeat is sent.
  void ReadOn();

  // Time since the last message of `rank`.
  int64_t SilenceUs(int rank) const;
  uint64_t epoch() const { return epoch_; }
  int world() const { return static_cast<int>(last_heard_us_.size()); }

 private:
  void OnAccepted(int rank) override;
  void OnHeartbeat(int rank) override;
  void OnResult(int rank, RankResult result) override;
  void OnClosed(int rank, const absl::Status& status) override;
  void Heard(int rank);

  const uint64_t epoch_;
  const Clock& clock_;
  EngineInbox& inbox_;
  std::vector<std::atomic<int64_t>> last_heard_us_;
  std::atomic<uint64_t> next_heartbeat_{1};

  std::mutex mutex_;
  std::condition_variable changed_;
  int num_accepted_ = 0;
  bool serving_ = false;
  bool closing_ = false;
  std::string lost_;  // why, once a rank is lost
  std::vector<std::string> endpoints_;
  std::vector<std::unique_ptr<StepStream>> streams_;  // written by Open only
};

}  // namespace twinspark::gateway
