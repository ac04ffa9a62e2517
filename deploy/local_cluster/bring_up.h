// `local_cluster up`: starts the supervisor, shows progress, waits for ready, asks the first
// questions, lets the cluster go. Until the release the cluster hangs on this process: its end, for
// whatever reason, ends everything.
#pragma once

#include <optional>
#include <string>

#include "absl/status/status.h"

namespace twinspark {

struct UpOptions {
  std::string bin_dir;
  std::string run_dir;
  std::string model_dir;  // empty: MODEL_DIR, else demo_dir
  std::string demo_dir;
  int tp = 2;
  std::optional<int> port;  // unset: PORT, else what a running cluster has, else 8888
  bool smoke = false;       // stop after the answer; success only if it was 323
};

inline constexpr int kDefaultPort = 8888;

// Exit code (common/exit_codes.h); 1 when a smoke test got another answer.
int BringUp(const UpOptions& options);

// Ends the cluster that run_dir/cluster.json names, on whatever port. True when there was one.
bool BringDown(const std::string& run_dir);

// One line, or with `json` an object, about the cluster of run_dir. Exit code 0 when it is ready,
// 69 when not.
int PrintStatus(const std::string& run_dir, bool json);

}  // namespace twinspark
