// local_cluster: the five programs on this one machine. deploy/quickstart.sh builds them and calls
// `local_cluster up`.
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include <unistd.h>

#include "absl/strings/numbers.h"

#include "common/exit_codes.h"
#include "common/log.h"
#include "deploy/local_cluster/bring_up.h"
#include "deploy/local_cluster/given_settings.h"
#include "deploy/local_cluster/supervisor.h"

namespace twinspark {
namespace {

constexpr char kUsage[] =
    "usage: local_cluster up [--port P] [--model DIR] [--tp 1|2] [--smoke]   start, ask 17*19, "
    "leave it running (--smoke: stop it)\n"
    "       local_cluster down                                               stop it, on whatever "
    "port\n"
    "       local_cluster status [--json]                                    exit 0 when it is "
    "ready, 69 when not\n"
    "  A setting not given by a flag comes from the environment (PORT, MODEL_DIR, LISTEN_ADDR, "
    "...).\n"
    "  --run-dir DIR   logs and state (default: run/ of the checkout)\n"
    "Exit codes: 0 done, 1 wrong answer, 69 a part failed or is not there, 78 bad argument or "
    "setting, 130 interrupted.\n";

struct Arguments {
  std::string verb;
  UpOptions up;
  bool json = false;
  int lifeline_fd = -1;
  int report_fd = -1;
};

std::string Folder(const std::string& path) {
  return path.substr(0, path.rfind('/'));
}

std::optional<Arguments> Parse(int argc, char** argv) {
  Arguments arguments;
  const std::string self = AbsolutePath("/proc/self/exe");
  arguments.up.bin_dir = Folder(self);
  const std::string checkout =
      Folder(Folder(Folder(arguments.up.bin_dir)));  // CHECKOUT/build/PRESET/bin
  arguments.up.run_dir = checkout + "/run";
  arguments.up.demo_dir = AbsolutePath(checkout + "/deploy/demo_model");
  if (argc > 1) arguments.verb = argv[1];
  for (int i = 2; i < argc; ++i) {
    const std::string flag = argv[i];
    const bool has_value = i + 1 < argc;
    const std::string value = has_value ? argv[i + 1] : "";
    int number = 0;
    const bool is_number = has_value && absl::SimpleAtoi(value, &number);
    if (flag == "--smoke") {
      arguments.up.smoke = true;
      continue;
    }
    if (flag == "--json") {
      arguments.json = true;
      continue;
    }
    ++i;
    if (flag == "--model" && has_value) {
      arguments.up.model_dir = AbsolutePath(value);
    } else if (flag == "--run-dir" && has_value) {
      arguments.up.run_dir = AbsolutePath(value);
    } else if (flag == "--port" && is_number && number >= 0 && number <= 65535) {
      arguments.up.port = number;
    } else if (flag == "--tp" && (value == "1" || value == "2")) {
      arguments.up.tp = number;
    } else if (flag == "--lifeline-fd" && is_number) {
      arguments.lifeline_fd = number;
    } else if (flag == "--report-fd" && is_number) {
      arguments.report_fd = number;
    } else {
      std::cerr << "local_cluster: bad argument '" << flag << (has_value ? " " + value : "")
                << "'\n"
                << kUsage;
      return std::nullopt;
    }
  }
  return arguments;
}

int Main(int argc, char** argv) {
  const std::optional<Arguments> arguments = Parse(argc, argv);
  if (!arguments.has_value()) return kExitBadConfig;
  const UpOptions& up = arguments->up;
  if (arguments->verb == "up") return BringUp(up);
  if (arguments->verb == "status") return PrintStatus(up.run_dir, arguments->json);
  if (arguments->verb == "down") {
    std::cout << (BringDown(up.run_dir) ? "stopped\n" : "no cluster of this checkout is running\n");
    return kExitOk;
  }
  if (arguments->verb == "supervise") {
    InitLog("supervisor", "info");
    return Supervisor({up.bin_dir, up.run_dir, up.model_dir, up.tp, up.port.value_or(kDefaultPort),
                       arguments->lifeline_fd, arguments->report_fd})
        .Run();
  }
  const bool asked = arguments->verb == "--help" || arguments->verb == "-h";
  (asked ? std::cout : std::cerr) << kUsage;
  return asked ? kExitOk : kExitBadConfig;
}

}  // namespace
}  // namespace twinspark

int main(int argc, char** argv) {
  return twinspark::Main(argc, argv);
}
