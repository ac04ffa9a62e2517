#include "tests/load/run_dir.h"

#include <boost/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

#include "common/file_util.h"
#include "common/status_macros.h"

namespace twinspark {
namespace {

constexpr size_t kMaxFileBytes = 1 << 16;

// Of LISTEN_ADDR:PORT, as the gateway writes it. What listens everywhere is asked on the loopback.
absl::StatusOr<std::string> UrlOf(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == address.size())
    return absl::InvalidArgumentError(absl::StrCat("'", address, "' is no ADDRESS:PORT"));
  std::string host = address.substr(0, colon);
  if (host == "0.0.0.0") host = "127.0.0.1";
  if (host == "::") host = "::1";
  if (absl::StrContains(host, ':')) host = absl::StrCat("[", host, "]");
  return absl::StrCat("http://", host, address.substr(colon));
}

}  // namespace

absl::StatusOr<RunDir> ReadRunDir(const std::string& dir) {
  RunDir run;
  const std::string state_path = dir + "/cluster.json";
  ASSIGN_OR_RETURN(const std::string state, ReadFile(state_path, kMaxFileBytes));
  boost::system::error_code error;
  const boost::json::value json = boost::json::parse(state, error);
  const boost::json::value* pid = error ? nullptr : json.find_pointer("/supervisor_pid", error);
  if (pid == nullptr || !pid->is_int64() || pid->as_int64() <= 0)
    return absl::InvalidArgumentError(absl::StrCat(state_path, ": no supervisor_pid in it"));
  run.supervisor = static_cast<pid_t>(pid->as_int64());
  const std::string port_path = dir + "/gateway.port";
  ASSIGN_OR_RETURN(const std::string address, ReadFile(port_path, kMaxFileBytes));
  absl::StatusOr<std::string> url = UrlOf(std::string(absl::StripAsciiWhitespace(address)));
  if (!url.ok())
    return absl::InvalidArgumentError(absl::StrCat(port_path, ": ", url.status().message()));
  run.url = *std::move(url);
  return run;
}

}  // namespace twinspark
