// Ranks as processes, on one host or several: one TCP socket per pair of ranks, nothing else. Small
// and strict: a hello with job, epoch, rank and secret keeps strangers and stale peers out; every
// message starts with operation, sequence number and length, so that ranks that disagree are an
// error and not a wrong sum; one deadline per call; on any error every socket is closed, which the
// peers see at once. Thread-compatible like every Communicator; Abort may come from any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

#include "shard_worker/parallel/communicator.h"

namespace twinspark {

// A bound, listening socket: its address is known before the group is (PrepareGroup).
class TcpListener {
 public:
  // Binds `host` (a numeric address or a name) and a free port.
  static absl::StatusOr<std::unique_ptr<TcpListener>> Bind(const std::string& host);
  ~TcpListener();
  TcpListener(const TcpListener&) = delete;
  TcpListener& operator=(const TcpListener&) = delete;

  const std::string& address() const { return address_; }  // "host:port"
  int fd() const { return fd_; }

 private:
  TcpListener(int fd, std::string address) : fd_(fd), address_(std::move(address)) {}
  int fd_;
  std::string address_;
};

struct TcpGroup {
  uint64_t epoch = 0;
  int rank = 0;
  std::vector<std::string> addresses;  // by rank; world = size
  std::string secret;                  // equal on all ranks, at most 64 bytes
  int64_t connect_timeout_ms = 10000;
  int64_t call_timeout_ms = 1500;
  // Ends the connecting with CANCELLED within 100 ms once it is true; may be null.
  const std::atomic<bool>* cancelled = nullptr;
};

// Connects to all peers (in any start order) and runs a barrier. DEADLINE_EXCEEDED names the ranks
// that did not come. The listener is not needed afterwards.
absl::StatusOr<std::unique_ptr<Communicator>> ConnectTcpGroup(const TcpListener& listener,
                                                              const TcpGroup& group);

}  // namespace twinspark
