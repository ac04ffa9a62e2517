// The few HTTP calls that bringing a cluster up needs (libcurl). Blocking, one call at a time,
// every call bounded in time.
#pragma once

#include <functional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace twinspark {

struct HttpReply {
  int status = 0;
  std::string body;
};

// kUnavailable when nobody answers within timeout_ms.
absl::StatusOr<HttpReply> HttpGet(const std::string& url, int timeout_ms);

// Posts JSON; `on_data` gets every `data:` payload of the server-sent events as it arrives. A reply
// that is no event stream comes back whole in `body`.
absl::StatusOr<HttpReply> HttpPostEvents(
    const std::string& url,
    const std::string& json,
    int timeout_ms,
    const std::function<void(std::string_view payload)>& on_data);

}  // namespace twinspark
