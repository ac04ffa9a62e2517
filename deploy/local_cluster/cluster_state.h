// run/cluster.json: what this checkout's cluster is, for a later `up`, `down` or `status`. A
// recycled pid is not mistaken for ours: the process's start time must match too.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>

#include <sys/types.h>

#include "absl/status/statusor.h"

namespace twinspark {

struct ClusterState {
  pid_t supervisor_pid = 0;
  uint64_t supervisor_start_ticks = 0;  // field 22 of /proc/PID/stat
  int port = 0;
  std::string build_id;
  std::string model_dir;
  int tp = 0;
  std::map<std::string, std::string> settings;  // SettingsInForce (given_settings.h)
};

// kNotFound when there is none.
absl::StatusOr<ClusterState> ReadClusterState(const std::string& path);
absl::Status WriteClusterState(const std::string& path, const ClusterState& state);

// Commit, build type, and which binaries of bin_dir exactly: a rebuilt checkout is another build.
std::string BuildFingerprint(const std::string& bin_dir);

// What /proc/PID/stat says: the state letter ('T' = stopped by a signal, 'Z' = a zombie) and the
// start time.
struct ProcessStat {
  char state = '?';
  uint64_t start_ticks = 0;
};
// nullopt when there is no such process.
std::optional<ProcessStat> ReadProcessStat(pid_t pid);

// 0 when there is no such process, or only its zombie.
uint64_t ProcessStartTicks(pid_t pid);
bool SupervisorRuns(const ClusterState& state);

}  // namespace twinspark
