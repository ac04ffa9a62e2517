// See grpc_channel.h.
#include "common/rpc/grpc_channel.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include "common/limits.h"
#include "common/rpc/grpc_log.h"

namespace twinspark {

std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address) {
  QuietGrpcLog();
  grpc::ChannelArguments args;
  args.SetMaxReceiveMessageSize(static_cast<int>(limits::kMaxMessageBytes));
  args.SetMaxSendMessageSize(static_cast<int>(limits::kMaxMessageBytes));
  args.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, limits::kReconnectBackoffMsMin);
  args.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, limits::kReconnectBackoffMsMin);
  // Connections to a peer that comes back must not wait out the back-off of its absence: callers
  // have back-offs of their own.
  args.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
  // A peer whose host vanished sends no reset. Stopped processes are seen by our own heartbeats.
  args.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 10'000);
  args.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5'000);
  // One connection per channel: two channels to one address share nothing that can stall.
  args.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  args.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  // What every message would pay for and nobody here uses. Retries: their callers decide.
  args.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  args.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0);
  args.SetInt(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  args.SetInt(GRPC_ARG_ENABLE_CENSUS, 0);
  args.SetInt(GRPC_ARG_ENABLE_CHANNELZ, 0);
  // Windows of many messages that are small beside them need no probing.
  args.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), args);
}

}  // namespace twinspark
