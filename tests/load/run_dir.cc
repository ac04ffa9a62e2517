#include "tests/load/run_dir.h"

#include <boost/json.hpp>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"

#include "common/file_util.h"
#include "common/host_port.h"
#include "common/status_macros.h"
#include "common/string_view.h"

namespace twinspark {
namespace {

constexpr size_t kMaxFileBytes = 1 << 16;

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
  ASSIGN_OR_RETURN(const HostPort listening,
                   ParseHostPort(port_path, ToStd(absl::StripAsciiWhitespace(address))));
  run.url = LocalUrl(listening);
  return run;
}

}  // namespace twinspark
