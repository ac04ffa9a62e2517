// See host_port.h.
#include "common/host_port.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

#include "common/string_view.h"

namespace twinspark {

std::string HostPort::ToString() const {
  const bool is_v6 = host.find(':') != std::string::npos;
  return is_v6 ? absl::StrCat("[", host, "]:", port) : absl::StrCat(host, ":", port);
}

absl::StatusOr<HostPort> ParseHostPort(std::string_view key, std::string_view text) {
  const size_t colon = text.rfind(':');
  std::string_view host = text.substr(0, colon == std::string_view::npos ? 0 : colon);
  HostPort parsed;
  if (host.size() >= 2 && host.front() == '[' && host.back() == ']')
    host = host.substr(1, host.size() - 2);
  parsed.host = std::string(host);
  const bool port_ok = colon != std::string_view::npos &&
                       absl::SimpleAtoi(ToAbsl(text.substr(colon + 1)), &parsed.port);
  if (parsed.host.empty() || !port_ok || parsed.port < 0 || parsed.port > 65535) {
    return absl::InvalidArgumentError(absl::StrCat(
        ToAbsl(key), "='", ToAbsl(text), "': expected host:port with a port from 0 to 65535"));
  }
  return parsed;
}

std::string LocalUrl(HostPort listening) {
  if (listening.host.empty() || listening.host == "0.0.0.0") listening.host = "127.0.0.1";
  if (listening.host == "::") listening.host = "::1";
  return absl::StrCat("http://", listening.ToString());
}

}  // namespace twinspark
