// A gRPC server as every service of ours runs it: one address (port 0 takes a free one), the
// standard health service, reflection, our message size limits, a drain with a bound.
//
// Life: Start (listening; health says NOT_SERVING until SetServing) > SetServing(true) > Shutdown.
// Services are borrowed and must outlive the server. Thread-safe after Start.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace grpc {
class Server;
class Service;
}  // namespace grpc

namespace twinspark {

class GrpcServer {
 public:
  // kUnavailable, with the address in the text, when the port is taken.
  static absl::StatusOr<std::unique_ptr<GrpcServer>> Start(
      const std::string& address, const std::vector<grpc::Service*>& services);
  ~GrpcServer();
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  // What a client dials: the host of the address as given, with the port that was bound.
  const std::string& address() const { return address_; }
  int port() const { return port_; }

  // The answer of the health service for "" (the whole process).
  void SetServing(bool serving);

  // No new calls; running ones may finish within `grace`, then they are cancelled. Idempotent.
  void Shutdown(std::chrono::milliseconds grace);

 private:
  GrpcServer(std::string address, int port, std::unique_ptr<grpc::Server> server);

  std::string address_;
  int port_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace twinspark
