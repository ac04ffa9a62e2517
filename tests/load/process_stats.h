// CPU time and resident memory of the processes of a local cluster, from /proc.
#pragma once

#include <string>
#include <vector>

#include <sys/types.h>

#include "absl/status/statusor.h"

namespace twinspark {

struct ProcessStats {
  std::string name;  // the program's file name, and the rank where there are several
  pid_t pid = 0;
  double cpu_seconds = 0;  // user + system since its start
  double rss_mib = 0;
};

// The children of a supervisor, sorted by name. kNotFound when it is gone.
absl::StatusOr<std::vector<ProcessStats>> ReadClusterStats(pid_t supervisor);

}  // namespace twinspark
