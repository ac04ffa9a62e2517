// The data plane of the service: the Unix socket where workers attach, their sessions, and the one
// reactor thread that owns the gather engine and its reader. Knows no gRPC; the control plane
// (engram_service/service) posts its work here. A second thread writes the heartbeat words.
//
// Public methods are thread-safe. Destroying it ends all attachments. Spec:
// engram.md 4.1, 4.6, 4.7.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engram_service/io/block_reader.h"
#include "engram_service/read/gather_engine.h"
#include "engram_service/shm/ring_session.h"

namespace twinspark::engram {

struct RowServerOptions {
  // Socket where clients attach: '@' first = abstract (no file is left behind), empty = a fresh
  // abstract name.
  std::string socket;
  int max_attachments = 8;
  int spin_us = 20;  // busy wait for more work before sleeping
};

struct RowServerStats {
  GatherStats engine;
  SessionStats sessions;
  uint64_t attachments = 0;  // now
  uint64_t attachments_total = 0;
  uint64_t attachments_refused = 0;
  uint64_t slab_bytes = 0;
  std::string failure;  // why a layer is not served any more
};

// Rows as bytes, per layer of the table set, for the control plane.
struct GatheredRows {
  struct LayerBytes {
    std::vector<uint8_t> weights;
    std::vector<uint8_t> scales;
  };
  std::vector<LayerBytes> layers;  // empty vectors for layers that were not asked for
};

class RowServer {
 public:
  // `tables` outlives the server. `cache` may be null.
  static absl::StatusOr<std::unique_ptr<RowServer>> Start(const TableSet& tables,
                                                          std::unique_ptr<BlockReader> reader,
                                                          std::unique_ptr<RowCache> cache,
                                                          const RowServerOptions& options);
  ~RowServer();
  RowServer(const RowServer&) = delete;
  RowServer& operator=(const RowServer&) = delete;

  // Where clients attach, '@' first = abstract.
  const std::string& socket_name() const { return socket_name_; }
  std::string reader_name() const { return reader_name_; }

  // Blocks until the rows are there, at most `timeout`. `past_cache`: as the drive has them now.
  // RESOURCE_EXHAUSTED when 64 of these are in progress.
  absl::StatusOr<GatheredRows> Gather(std::vector<Window> windows,
                                      uint32_t layers,
                                      std::chrono::milliseconds timeout,
                                      bool past_cache = false);
  // Has the reactor compare the open files with what they were; the result is in stats().failure
  // once this returns, and in the header of every attached worker.
  void CheckTables();
  // False when hints are dropped.
  bool Prefetch(std::vector<Window> windows, int priority);

  // What clients read in their header; kRowServiceDraining also refuses new attachments.
  void SetState(uint32_t service_state) { service_state_ = service_state; }
  RowServerStats stats() const;
  const GatherMeters& meters() const { return engine_->meters(); }

 private:
  struct Client;
  RowServer(const TableSet& tables,
            std::unique_ptr<BlockReader> reader,
            std::unique_ptr<RowCache> cache,
            RowServerOptions options);

  absl::Status Listen();
  void Run();    // reactor thread
  bool Turn();   // one pass; whether anything was done
  void Sleep();  // until something happens
  void Accept();
  std::string Refusal(const RowAttachRequest& request) const;
  static bool SendReply(int socket, const RingSession* session, const std::string& refusal);
  void Handshake(Client& client);
  void Drop(Client& client, const char* why);
  void RemoveDropped();
  void RunHeartbeat();
  void Wake();
  void Post(std::function<void(GatherEngine&)> work);
  bool TakePosted();
  void PublishStats();

  const TableSet& tables_;
  const RowServerOptions options_;
  std::unique_ptr<BlockReader> reader_;
  std::unique_ptr<RowCache> cache_;
  const std::string reader_name_;
  std::unique_ptr<GatherEngine> engine_;
  std::string socket_name_;
  Fd listen_fd_;
  Fd wake_fd_;
  Fd epoll_fd_;
  std::vector<std::unique_ptr<Client>> clients_;  // reactor thread
  uint64_t next_epoch_ = 0;
  SessionStats session_stats_;  // reactor thread
  uint64_t attachments_total_ = 0;
  uint64_t attachments_refused_ = 0;

  std::mutex beat_mutex_;  // sessions that get heartbeats
  std::vector<RingSession*> beating_;

  mutable std::mutex mutex_;
  std::vector<std::function<void(GatherEngine&)>> posted_;
  RowServerStats published_;

  std::atomic<size_t> gathers_{0};  // of Gather, waiting or in progress
  std::atomic<uint32_t> service_state_{kRowServiceReady};
  std::atomic<bool> stop_{false};
  std::thread reactor_;
  std::thread heartbeat_;
};

}  // namespace twinspark::engram
