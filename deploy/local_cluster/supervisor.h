// The small detached process behind a local cluster: starts the parts, reports progress to the `up`
// that started it until that lets go, then watches. Before the release any failure, or the end of
// `up` for whatever reason, ends everything. After it a part's end is logged; a part that was
// stopped (SIGSTOP) for kStoppedSecondsMax is ended, since the gateway gave it up long before.
// Single-threaded.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "deploy/local_cluster/child_process.h"

namespace twinspark {

struct SupervisorOptions {
  std::string bin_dir;  // where gateway, shard_worker, engram_service are
  std::string run_dir;  // logs, port files, cluster.json
  std::string model_dir;
  int tp = 2;
  int port = 8888;
  int lifeline_fd =
      -1;  // read end: a byte 'R' is the release, end of file before it means: end everything
  int report_fd = -1;  // write end: progress lines for `up`
};

class Supervisor {
 public:
  static constexpr int kStoppedSecondsMax = 5;
  static constexpr int kStartSecondsMax = 20;

  explicit Supervisor(SupervisorOptions options) : options_(std::move(options)) {}

  // Runs until SIGTERM, SIGINT, a failure before the release, or the end of the gateway. Returns
  // the exit code.
  int Run();

 private:
  absl::Status StartAll();
  absl::Status StartPart(const std::string& name,
                         std::vector<std::string> arguments,
                         const std::vector<std::string>& metrics_flags);
  absl::StatusOr<std::string> WaitForPort(const std::string& name);
  absl::Status CheckParts();     // an error when a part ended
  absl::Status CheckLifeline();  // an error when `up` is gone
  int Watch();                   // after StartAll
  void EndStopped();
  void EndAll();
  void Report(const std::string& line);
  std::string PathOf(const std::string& name) const { return options_.run_dir + "/" + name; }

  SupervisorOptions options_;
  std::vector<ChildProcess> parts_;        // in start order; ended in reverse
  std::vector<int64_t> stopped_since_ms_;  // per part; 0 while it runs
  std::vector<bool> end_reported_;
  bool released_ = false;
};

}  // namespace twinspark
