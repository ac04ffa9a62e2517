// See supervisor.h.
#include "deploy/local_cluster/supervisor.h"

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <thread>

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/file_util.h"
#include "common/log.h"
#include "common/status_macros.h"
#include "deploy/local_cluster/cluster_state.h"
#include "deploy/local_cluster/given_settings.h"

namespace twinspark {
namespace {

constexpr int kPollMs = 20;
constexpr int64_t kDrainMsMax = 25000;  // the gateway's DRAIN_SECONDS of 20 and some
constexpr int64_t kEndMsMax = 3000;

volatile std::sig_atomic_t g_stop_signal = 0;
void OnStopSignal(int number) {
  g_stop_signal = number;
}

int64_t NowMs() {
  return SteadyClock().NowMs();
}

void SleepMs(int ms) {
  std::this_thread::sleep_for(std::chrono::milliseconds(ms));
}

}  // namespace

int Supervisor::Run() {
  struct sigaction action {};
  action.sa_handler = OnStopSignal;
  sigaction(SIGTERM, &action, nullptr);
  sigaction(SIGINT, &action, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  for (const int fd : {options_.lifeline_fd, options_.report_fd}) {
    if (fd >= 0) fcntl(fd, F_SETFD, FD_CLOEXEC);  // the parts must not hold them open
  }
  const absl::Status started = StartAll();
  int code = kExitOk;
  if (!started.ok()) {
    LOG_ERROR << started.message();
    Report(absl::StrCat("failed ", std::string(started.message())));
    code = kExitUnavailable;
  } else {
    code = Watch();
  }
  EndAll();
  unlink(PathOf("cluster.json").c_str());
  LOG_INFO << "cluster ended code=" << code;
  return code;
}

absl::Status Supervisor::StartPart(const std::string& name,
                                   std::vector<std::string> arguments,
                                   const std::vector<std::string>& metrics_flags) {
  const std::string program = name.substr(0, name.find('-'));
  arguments.insert(arguments.begin(), options_.bin_dir + "/" + program);
  arguments.insert(arguments.end(), {"--port-file", PathOf(name + ".port")});
  arguments.insert(arguments.end(), metrics_flags.begin(), metrics_flags.end());
  unlink(PathOf(name + ".port").c_str());
  ASSIGN_OR_RETURN(ChildProcess child,
                   ChildProcess::Start({name, std::move(arguments), PathOf(name + ".log")}));
  LOG_INFO << "started " << name << " pid=" << child.pid()
           << (metrics_flags.empty() ? "" : " metrics=" + metrics_flags.back());
  parts_.push_back(std::move(child));
  stopped_since_ms_.push_back(0);
  end_reported_.push_back(false);
  return absl::OkStatus();
}

absl::StatusOr<std::string> Supervisor::WaitForPort(const std::string& name) {
  const int64_t give_up_ms = NowMs() + kStartSecondsMax * 1000;
  while (NowMs() < give_up_ms) {
    const absl::StatusOr<std::string> address = ReadFile(PathOf(name + ".port"), 4096);
    if (address.ok()) return std::string(absl::StripAsciiWhitespace(*address));
    RETURN_IF_ERROR(CheckParts());
    RETURN_IF_ERROR(CheckLifeline());
    SleepMs(kPollMs);
  }
  return absl::DeadlineExceededError(absl::StrCat(name, " did not listen within ", kStartSecondsMax,
                                                  " s; read ", PathOf(name + ".log")));
}

absl::Status Supervisor::StartAll() {
  ASSIGN_OR_RETURN(const Settings settings, ReadGivenSettings());
  ASSIGN_OR_RETURN(const SettingsInForce in_force, ReadSettingsInForce());
  const std::string metrics = settings.String("METRICS_ADDR");
  int64_t threads = settings.Int("COMPUTE_THREADS");
  if (threads == 0)
    threads = std::max(1, static_cast<int>(std::thread::hardware_concurrency()) / options_.tp);
  for (int rank = 0; rank < options_.tp; ++rank) {
    RETURN_IF_ERROR(StartPart(
        absl::StrCat("engram_service-", rank),
        {"--model-dir", options_.model_dir, "--engram-listen", "127.0.0.1:0", "--engram-rank",
         absl::StrCat(rank), "--engram-world", absl::StrCat(options_.tp)},
        MetricsFlags(metrics, 1 + 2 * rank)));
    RETURN_IF_ERROR(
        StartPart(absl::StrCat("shard_worker-", rank),
                  {"--worker-listen", "127.0.0.1:0", "--compute-threads", absl::StrCat(threads)},
                  MetricsFlags(metrics, 2 + 2 * rank)));
  }
  std::vector<std::string> workers;
  std::vector<std::string> engrams;
  for (int rank = 0; rank < options_.tp; ++rank) {
    ASSIGN_OR_RETURN(engrams.emplace_back(), WaitForPort(absl::StrCat("engram_service-", rank)));
    ASSIGN_OR_RETURN(workers.emplace_back(), WaitForPort(absl::StrCat("shard_worker-", rank)));
    Report(absl::StrCat("rank ", rank, ": row service on ", engrams.back(), ", worker on ",
                        workers.back()));
  }
  std::vector<std::string> arguments = {"--model-dir",
                                        options_.model_dir,
                                        "--port",
                                        absl::StrCat(options_.port),
                                        "--workers",
                                        absl::StrJoin(workers, ","),
                                        "--engram-endpoints",
                                        absl::StrJoin(engrams, ","),
                                        "--rendezvous-timeout",
                                        absl::StrCat(kStartSecondsMax)};
  RETURN_IF_ERROR(StartPart("gateway", std::move(arguments), MetricsFlags(metrics, 0)));
  ASSIGN_OR_RETURN(const std::string address, WaitForPort("gateway"));
  const size_t colon = address.rfind(':');
  const int port = std::atoi(address.c_str() + (colon == std::string::npos ? 0 : colon + 1));
  RETURN_IF_ERROR(WriteClusterState(
      PathOf("cluster.json"),
      {getpid(), ProcessStartTicks(getpid()), port, BuildFingerprint(options_.bin_dir),
       options_.model_dir, options_.tp, in_force}));
  Report(absl::StrCat("listening ", port));
  return absl::OkStatus();
}

absl::Status Supervisor::CheckParts() {
  for (size_t i = 0; i < parts_.size(); ++i) {
    const std::optional<std::string> text = parts_[i].ExitText();
    if (!text.has_value() || end_reported_[i]) continue;
    end_reported_[i] = true;
    return absl::UnavailableError(absl::StrCat(parts_[i].name(), " ", *text, "; read ",
                                               parts_[i].log_path(), "\n",
                                               TailOfFile(parts_[i].log_path(), 5)));
  }
  return absl::OkStatus();
}

absl::Status Supervisor::CheckLifeline() {
  if (g_stop_signal != 0) return absl::CancelledError("stopped by a signal");
  if (released_ || options_.lifeline_fd < 0) return absl::OkStatus();
  pollfd ready{options_.lifeline_fd, POLLIN, 0};
  if (poll(&ready, 1, 0) <= 0) return absl::OkStatus();
  char byte = 0;
  if (read(options_.lifeline_fd, &byte, 1) == 1 && byte == 'R') {
    released_ = true;
    close(options_.report_fd);
    options_.report_fd = -1;
    return absl::OkStatus();
  }
  return absl::CancelledError("the `up` that started this cluster is gone");
}

int Supervisor::Watch() {
  while (true) {
    if (const absl::Status up = CheckLifeline(); !up.ok()) {
      LOG_INFO << "ending: " << up.message();
      return kExitOk;
    }
    if (const absl::Status part = CheckParts(); !part.ok()) {
      LOG_ERROR << part.message();
      Report(absl::StrCat("failed ", std::string(part.message())));
      if (!released_ || !parts_.back().running())
        return kExitUnavailable;  // the gateway was started last
    }
    EndStopped();
    SleepMs(kPollMs);
  }
}

void Supervisor::EndStopped() {
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (!parts_[i].running()) continue;
    // A debugger's stop ('t') is left alone.
    if (ReadProcessStat(parts_[i].pid()).value_or(ProcessStat{}).state != 'T') {
      stopped_since_ms_[i] = 0;
    } else if (stopped_since_ms_[i] == 0) {
      stopped_since_ms_[i] = NowMs();
      LOG_WARNING << parts_[i].name() << " pid=" << parts_[i].pid() << " is stopped";
    } else if (NowMs() - stopped_since_ms_[i] > kStoppedSecondsMax * 1000) {
      LOG_WARNING << parts_[i].name() << " pid=" << parts_[i].pid() << " was stopped for "
                  << kStoppedSecondsMax << " s: ending it";
      parts_[i].Signal(SIGKILL);
    }
  }
}

void Supervisor::EndAll() {
  auto wait_for = [&](ChildProcess& part, int64_t ms_max) {
    for (const int64_t give_up_ms = NowMs() + ms_max; part.running() && NowMs() < give_up_ms;)
      SleepMs(kPollMs);
  };
  // In reverse order of the start: the gateway first, so that its streams end well while the
  // workers still compute. Whoever asked before the release wants it quick.
  if (released_ && !parts_.empty() && parts_.back().running()) {
    parts_.back().Signal(SIGTERM);
    wait_for(parts_.back(), kDrainMsMax);
  }
  for (ChildProcess& part : parts_)
    part.Signal(SIGTERM);
  for (ChildProcess& part : parts_)
    wait_for(part, released_ ? kEndMsMax : 500);
  parts_.clear();  // whatever is left gets SIGKILL
}

void Supervisor::Report(const std::string& line) {
  if (options_.report_fd < 0) return;
  const std::string text = line + "\n";
  [[maybe_unused]] const ssize_t written = write(options_.report_fd, text.data(), text.size());
}

}  // namespace twinspark
