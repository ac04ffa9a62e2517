// "host:port" texts of the settings, parsed once. IPv6 hosts in brackets.
#pragma once

#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace twinspark {

struct HostPort {
  std::string host;
  int port = 0;

  std::string ToString() const;
};

// kInvalidArgument with the text in it; `key` names the setting it came from.
absl::StatusOr<HostPort> ParseHostPort(std::string_view key, std::string_view text);

// "http://HOST:PORT" at which the machine of an HTTP server reaches it. `listening`: where the
// server listens; everywhere (no host, 0.0.0.0, ::) is asked on the loopback.
std::string LocalUrl(HostPort listening);

}  // namespace twinspark
