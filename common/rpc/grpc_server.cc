// See grpc_server.h.
#include "common/rpc/grpc_server.h"

#include <utility>

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>
#include <grpcpp/server_builder.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "common/host_port.h"
#include "common/limits.h"
#include "common/rpc/grpc_log.h"
#include "common/status_macros.h"

namespace twinspark {
namespace {

std::string WithPort(const std::string& address, int port) {
  if (absl::StartsWith(address, "unix:")) return address;
  return absl::StrCat(address.substr(0, address.rfind(':')), ":", port);
}

}  // namespace

absl::StatusOr<std::unique_ptr<GrpcServer>> GrpcServer::Start(
    const std::string& address, const std::vector<grpc::Service*>& services) {
  if (!absl::StartsWith(address, "unix:"))
    RETURN_IF_ERROR(ParseHostPort("listen address", address).status());
  QuietGrpcLog();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort(address, grpc::InsecureServerCredentials(), &port);
  // With SO_REUSEPORT a second process on the same port would start and take half of the calls.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 5'000);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_CENSUS, 0);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_CHANNELZ, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.SetMaxReceiveMessageSize(static_cast<int>(limits::kMaxMessageBytes));
  builder.SetMaxSendMessageSize(static_cast<int>(limits::kMaxMessageBytes));
  for (grpc::Service* service : services)
    builder.RegisterService(service);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  const bool bound = absl::StartsWith(address, "unix:") || port != 0;
  if (server == nullptr || !bound) {
    return absl::UnavailableError(
        absl::StrCat("cannot listen on ", address,
                     ": the port is taken or the address is not one of this host; ",
                     "choose another one, or end the process that has it"));
  }
  return std::unique_ptr<GrpcServer>(
      new GrpcServer(WithPort(address, port), port, std::move(server)));
}

GrpcServer::GrpcServer(std::string address, int port, std::unique_ptr<grpc::Server> server)
    : address_(std::move(address)), port_(port), server_(std::move(server)) {
  SetServing(false);
}

GrpcServer::~GrpcServer() {
  Shutdown(std::chrono::milliseconds(0));
}

void GrpcServer::SetServing(bool serving) {
  server_->GetHealthCheckService()->SetServingStatus(serving);
}

void GrpcServer::Shutdown(std::chrono::milliseconds grace) {
  server_->Shutdown(std::chrono::system_clock::now() + grace);
}

}  // namespace twinspark
