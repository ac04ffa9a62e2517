// The one place for channel arguments: message size, reconnect back-off, keepalive. Clients of
// every service make their channels here. Thread-safe.
#pragma once

#include <memory>
#include <string>

#include <grpcpp/channel.h>

namespace twinspark {

// `address`: "host:port" or "unix:/path". Does not connect; the first call does. Every call must
// carry a deadline or wait_for_ready(false): a channel to nobody fails fast.
std::shared_ptr<grpc::Channel> MakeChannel(const std::string& address);

}  // namespace twinspark
