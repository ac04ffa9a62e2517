// See cluster_state.h.
#include "deploy/local_cluster/cluster_state.h"

#include <fstream>
#include <sstream>

#include <boost/json.hpp>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"

#include "common/build_info.h"
#include "common/file_util.h"
#include "common/ids.h"
#include "common/status_macros.h"

namespace twinspark {

absl::StatusOr<ClusterState> ReadClusterState(const std::string& path) {
  ASSIGN_OR_RETURN(const std::string text, ReadFile(path, 1 << 16));
  boost::system::error_code error;
  const boost::json::value json = boost::json::parse(text, error);
  const boost::json::object* object = error ? nullptr : json.if_object();
  if (object == nullptr)
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a JSON object; delete it"));
  ClusterState state;
  try {
    state.supervisor_pid = object->at("supervisor_pid").to_number<pid_t>();
    state.supervisor_start_ticks = object->at("supervisor_start_ticks").to_number<uint64_t>();
    state.port = object->at("port").to_number<int>();
    state.build_id = object->at("build_id").as_string().c_str();
    state.model_dir = object->at("model_dir").as_string().c_str();
    state.tp = object->at("tp").to_number<int>();
    if (const boost::json::value* settings = object->if_contains("settings")) {
      for (const auto& [key, value] : settings->as_object())
        state.settings[std::string(key)] = value.as_string().c_str();
    }
  } catch (const std::exception& bad) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", bad.what(), "; delete it"));
  }
  return state;
}

absl::Status WriteClusterState(const std::string& path, const ClusterState& state) {
  boost::json::object settings;
  for (const auto& [key, value] : state.settings)
    settings[key] = value;
  const boost::json::object object = {{"supervisor_pid", state.supervisor_pid},
                                      {"supervisor_start_ticks", state.supervisor_start_ticks},
                                      {"port", state.port},
                                      {"build_id", state.build_id},
                                      {"model_dir", state.model_dir},
                                      {"tp", state.tp},
                                      {"settings", settings}};
  return WriteFileAtomically(path, boost::json::serialize(object) + "\n");
}

std::string BuildFingerprint(const std::string& bin_dir) {
  std::string facts;
  for (const char* program : {"gateway", "shard_worker", "engram_service"}) {
    struct stat info {};
    if (stat(absl::StrCat(bin_dir, "/", program).c_str(), &info) != 0) continue;
    absl::StrAppend(&facts, program, info.st_size, ".", info.st_mtim.tv_sec, ".",
                    info.st_mtim.tv_nsec, ";");
  }
  return absl::StrCat(BuildId(), " ", Hex16(Hash64(facts)));
}

std::optional<ProcessStat> ReadProcessStat(pid_t pid) {
  std::ifstream file(absl::StrCat("/proc/", pid, "/stat"));
  const std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  const size_t after_name = text.rfind(')');  // the name may hold spaces and brackets
  if (after_name == std::string::npos || after_name + 2 >= text.size()) return std::nullopt;
  std::istringstream fields(text.substr(after_name + 2));
  ProcessStat stat;
  fields >> stat.state;  // field 3
  std::string skipped;
  for (int field = 4; field < 22; ++field)
    fields >> skipped;
  fields >> stat.start_ticks;
  return stat;
}

uint64_t ProcessStartTicks(pid_t pid) {
  const std::optional<ProcessStat> stat = ReadProcessStat(pid);
  return !stat.has_value() || stat->state == 'Z' ? 0 : stat->start_ticks;
}

bool SupervisorRuns(const ClusterState& state) {
  return state.supervisor_pid > 0 && state.supervisor_start_ticks != 0 &&
         ProcessStartTicks(state.supervisor_pid) == state.supervisor_start_ticks;
}

}  // namespace twinspark
