// The control plane: proto in, Serving underneath. Synchronous gRPC handlers, because Gather and
// Canary wait for reads and a callback reactor must not. Thread-safe.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"

#include "engram_service/service/serving.h"
#include "proto/engram.grpc.pb.h"

namespace twinspark::engram {

class EngramServiceImpl final : public proto::engram::EngramService::Service {
 public:
  explicit EngramServiceImpl(ServingOptions options);

  // Opens the tables for the first time; until then every call but Status is UNAVAILABLE.
  absl::Status Open();
  // Compares the open table files with what they were; when one was written to, nothing of it is
  // served any more (FAILED) and the tables are opened and checked anew. Workers then compare with
  // their last epoch. Call it every second or so (TableWatch), one thread.
  void CheckTables();
  // No new attachments; attached clients are served until they leave.
  void StartDrain(const std::string& reason);

  std::shared_ptr<Serving> serving() const;
  uint64_t attachments() const;
  uint64_t rpc_gathers() const { return rpc_gathers_; }
  uint64_t table_changes() const { return table_changes_; }
  proto::engram::ServiceState state(std::string* reason) const;

  grpc::Status Hello(grpc::ServerContext* context,
                     const proto::engram::HelloRequest* request,
                     proto::engram::HelloReply* reply) override;
  grpc::Status Gather(grpc::ServerContext* context,
                      const proto::engram::GatherRequest* request,
                      proto::engram::GatherReply* reply) override;
  grpc::Status Prefetch(grpc::ServerContext* context,
                        const proto::engram::PrefetchRequest* request,
                        proto::engram::PrefetchReply* reply) override;
  grpc::Status Status(grpc::ServerContext* context,
                      const proto::engram::StatusRequest* request,
                      proto::engram::StatusReply* reply) override;
  grpc::Status Drain(grpc::ServerContext* context,
                     const proto::engram::DrainRequest* request,
                     proto::engram::DrainReply* reply) override;
  grpc::Status Verify(grpc::ServerContext* context,
                      const proto::engram::VerifyRequest* request,
                      grpc::ServerWriter<proto::engram::VerifyProgress>* writer) override;
  grpc::Status Reload(grpc::ServerContext* context,
                      const proto::engram::ReloadRequest* request,
                      proto::engram::ReloadReply* reply) override;
  grpc::Status Canary(grpc::ServerContext* context,
                      const proto::engram::CanaryRequest* request,
                      proto::engram::CanaryReply* reply) override;

 private:
  absl::StatusOr<std::shared_ptr<Serving>> Ready() const;
  absl::StatusOr<std::shared_ptr<Serving>> Reopen();
  void FillStatus(const Serving& serving, proto::engram::StatusReply* reply) const;

  const ServingOptions options_;
  const std::chrono::steady_clock::time_point started_;
  std::atomic<uint64_t> rpc_gathers_{0};
  std::atomic<uint64_t> table_changes_{0};
  std::mutex reload_mutex_;  // one Reload at a time
  mutable std::mutex mutex_;
  std::shared_ptr<Serving> serving_;
  bool draining_ = false;
  std::string drain_reason_;
  std::string change_;        // the last change on disk that was met; until Reload
  std::string replaced_;      // paths that lead to another file by now
  std::string reopen_error_;  // why the tables could not be opened again
};

}  // namespace twinspark::engram
