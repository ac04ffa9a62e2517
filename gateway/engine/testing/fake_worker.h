// A shard worker without a model, over real gRPC: the states and messages of the protocol, with
// ToyWorker behind them and faults on demand. Tests of the engine run a group of them in one
// process, on ports of their own. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"

#include "gateway/scheduler/scheduler.h"
#include "gateway/testing/toy_worker.h"

namespace twinspark {
class GrpcServer;
}

namespace twinspark::gateway {

struct FakeWorkerConfig {
  ToyLanguage language;
  EpochLimits limits;
  std::string address = "127.0.0.1:0";
  std::string build;  // empty: this build
  std::string weights_digest = "00000000000000aa";
  std::string own_slices_digest = "00000000000000dd";
  int64_t op_delay_us = 0;
  // More prompt log-probabilities than this are refused by name, as by a worker of an older build.
  int max_prompt_logprobs = 20;
};

class FakeWorker {
 public:
  explicit FakeWorker(const FakeWorkerConfig& config);
  ~FakeWorker();
  FakeWorker(const FakeWorker&) = delete;
  FakeWorker& operator=(const FakeWorker&) = delete;

  const std::string& address() const;

  // Faults. Each holds from the next op on.
  void Freeze(bool frozen);          // as SIGSTOP: no results, no heartbeats
  void StickOps(bool stuck);         // ops never finish; heartbeats go on
  void DivergeAt(int ops_from_now);  // wrong digest, once
  void FailAt(int ops_from_now,      // once
              const absl::Status& status = absl::InternalError("asked to fail"));
  void RefuseConfigure(const std::string& reason);  // empty: accepts again
  void ChangeSlices(const std::string& digest);  // what the next Configure reports of its weights
  void Die();                                    // ends the server: connections break

  uint64_t num_ops() const;
  uint64_t num_configures() const;
  int slots_in_use() const;
  int pages_in_use() const;
  bool is_serving() const;

 private:
  class Service;
  std::unique_ptr<Service> service_;
  std::unique_ptr<GrpcServer> server_;
};

}  // namespace twinspark::gateway
