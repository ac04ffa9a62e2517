// The run folder of a local cluster (deploy/README.md): which processes are its, and where its
// gateway answers.
#pragma once

#include <string>

#include <sys/types.h>

#include "absl/status/statusor.h"

namespace twinspark {

struct RunDir {
  pid_t supervisor = 0;
  std::string url;  // "http://127.0.0.1:8888", as this machine reaches it
};

// From DIR/cluster.json and DIR/gateway.port. An error names the file and what is wrong with it.
absl::StatusOr<RunDir> ReadRunDir(const std::string& dir);

}  // namespace twinspark
