#include "tests/load/process_stats.h"

#include <algorithm>
#include <fstream>
#include <sstream>

#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace twinspark {
namespace {

std::string ReadProc(pid_t pid, const char* file) {
  std::ifstream in(absl::StrCat("/proc/", pid, "/", file), std::ios::binary);
  return std::string((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
}

// "engram_service-0" from ".../engram_service\0--port-file\0.../engram_service-0.port\0".
std::string NameOf(pid_t pid) {
  const std::string command = ReadProc(pid, "cmdline");
  const size_t port_file = command.find("--port-file");
  if (port_file == std::string::npos) return command.substr(0, command.find('\0'));
  std::string path = command.substr(command.find('\0', port_file) + 1);
  path = path.substr(0, path.find('\0'));
  path = path.substr(path.rfind('/') + 1);
  return path.substr(0, path.rfind(".port"));
}

ProcessStats ReadOne(pid_t pid) {
  ProcessStats stats;
  stats.pid = pid;
  stats.name = NameOf(pid);
  const std::string stat = ReadProc(pid, "stat");
  std::istringstream fields(stat.substr(std::min(stat.rfind(')') + 2, stat.size())));
  std::string skipped;
  for (int field = 3; field < 14; ++field)
    fields >> skipped;
  double user_ticks = 0;
  double system_ticks = 0;
  fields >> user_ticks >> system_ticks;  // fields 14 and 15
  stats.cpu_seconds = (user_ticks + system_ticks) / static_cast<double>(sysconf(_SC_CLK_TCK));
  std::istringstream pages(ReadProc(pid, "statm"));
  double total = 0;
  double resident = 0;
  pages >> total >> resident;
  stats.rss_mib = resident * static_cast<double>(sysconf(_SC_PAGESIZE)) / (1 << 20);
  return stats;
}

}  // namespace

absl::StatusOr<std::vector<ProcessStats>> ReadClusterStats(pid_t supervisor) {
  std::istringstream children(
      ReadProc(supervisor, absl::StrCat("task/", supervisor, "/children").c_str()));
  std::vector<ProcessStats> all;
  for (pid_t pid = 0; children >> pid;)
    all.push_back(ReadOne(pid));
  if (all.empty())
    return absl::NotFoundError(
        absl::StrCat("process ", supervisor, " has no children: is the cluster running?"));
  std::sort(all.begin(), all.end(),
            [](const ProcessStats& a, const ProcessStats& b) { return a.name < b.name; });
  return all;
}

}  // namespace twinspark
