// See bring_up.h.
#include "deploy/local_cluster/bring_up.h"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <iostream>
#include <thread>

#include <boost/json.hpp>
#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

#include "common/clock.h"
#include "common/exit_codes.h"
#include "common/host_port.h"
#include "common/model_config.h"
#include "common/status_macros.h"
#include "deploy/local_cluster/child_process.h"
#include "deploy/local_cluster/cluster_state.h"
#include "deploy/local_cluster/first_chat.h"
#include "deploy/local_cluster/given_settings.h"
#include "deploy/local_cluster/http_client.h"

namespace twinspark {
namespace {

constexpr char kQuestion[] = "What is 17*19? Reply with the integer only.";
constexpr char kAnswer[] = "323";
constexpr char kSecondQuestion[] = "tell me a story";
constexpr int64_t kReadyMsMax = 120000;
constexpr int64_t kSupervisorEndMsMax = 5000;
constexpr int64_t kDownMsMax = 40000;
constexpr uint64_t kRunDirBytesMin = uint64_t{8} << 20;  // logs and state of some days

volatile std::sig_atomic_t g_interrupted = 0;
void OnInterrupt(int number) {
  g_interrupted = number;
}

void CatchInterrupts() {
  struct sigaction action {};
  action.sa_handler = OnInterrupt;
  for (const int number : {SIGTERM, SIGINT, SIGHUP})
    sigaction(number, &action, nullptr);
}

int64_t NowMs() {
  return SteadyClock().NowMs();
}

// Lines with the seconds since the start.
class Progress {
 public:
  void Say(const std::string& text) {
    if (text == last_) return;
    last_ = text;
    std::cout << absl::StrFormat("[%5.1f s] %s", static_cast<double>(NowMs() - start_ms_) / 1e3,
                                 text)
              << std::endl;
  }

 private:
  int64_t start_ms_ = NowMs();
  std::string last_;
};

// The supervisor as our child until it is released.
class SupervisorHandle {
 public:
  ~SupervisorHandle() {
    End();
    if (report_ >= 0) close(report_);
  }

  absl::Status Start(const UpOptions& options) {
    int lifeline[2];
    int report[2];
    if (pipe2(lifeline, O_CLOEXEC) != 0 || pipe2(report, O_CLOEXEC) != 0)
      return absl::UnavailableError(std::strerror(errno));
    const std::string self = "/proc/self/exe";
    std::vector<std::string> arguments = {absl::StrCat(options.bin_dir, "/local_cluster"),
                                          "supervise",
                                          "--run-dir",
                                          options.run_dir,
                                          "--model",
                                          options.model_dir,
                                          "--tp",
                                          absl::StrCat(options.tp),
                                          "--port",
                                          absl::StrCat(options.port.value_or(kDefaultPort)),
                                          "--lifeline-fd",
                                          absl::StrCat(lifeline[0]),
                                          "--report-fd",
                                          absl::StrCat(report[1])};
    std::vector<char*> argv;
    for (std::string& argument : arguments)
      argv.push_back(argument.data());
    argv.push_back(nullptr);
    const int log = open(absl::StrCat(options.run_dir, "/supervisor.log").c_str(),
                         O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644);
    if (log < 0)
      return absl::UnavailableError(
          absl::StrCat(options.run_dir, "/supervisor.log: ", std::strerror(errno)));
    pid_ = fork();
    if (pid_ == 0) {
      setsid();
      const int null_fd = open("/dev/null", O_RDONLY);
      dup2(null_fd, STDIN_FILENO);
      dup2(log, STDOUT_FILENO);
      dup2(log, STDERR_FILENO);
      fcntl(lifeline[0], F_SETFD, 0);
      fcntl(report[1], F_SETFD, 0);
      execv(self.c_str(), argv.data());
      _exit(127);
    }
    close(log);
    close(lifeline[0]);
    close(report[1]);
    lifeline_ = lifeline[1];
    report_ = report[0];
    return pid_ < 0 ? absl::UnavailableError("fork failed") : absl::OkStatus();
  }

  // Lines reported since the last call; waits up to wait_ms for one. nullopt: the supervisor ended.
  std::optional<std::string> ReadReports(int wait_ms) {
    pollfd ready{report_, POLLIN, 0};
    if (poll(&ready, 1, wait_ms) <= 0) return "";
    char buffer[4096];
    const ssize_t count = read(report_, buffer, sizeof(buffer));
    if (count <= 0) return std::nullopt;
    return std::string(buffer, static_cast<size_t>(count));
  }

  void Release() {
    [[maybe_unused]] const ssize_t written = write(lifeline_, "R", 1);
    close(lifeline_);
    lifeline_ = -1;
    pid_ = -1;
  }

  // Ends everything and waits for it.
  void End() {
    if (pid_ <= 0) return;
    close(lifeline_);
    lifeline_ = -1;
    for (const int64_t give_up_ms = NowMs() + kSupervisorEndMsMax; NowMs() < give_up_ms;) {
      if (waitpid(pid_, nullptr, WNOHANG) == pid_) {
        pid_ = -1;
        return;
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    kill(pid_, SIGKILL);  // its children get SIGKILL from the kernel
    waitpid(pid_, nullptr, 0);
    pid_ = -1;
  }

 private:
  pid_t pid_ = -1;
  int lifeline_ = -1;
  int report_ = -1;
};

std::string TextOf(const boost::json::value& json, const char* pointer) {
  boost::system::error_code error;
  const boost::json::value* found = json.find_pointer(pointer, error);
  if (found == nullptr) return "";
  return found->is_string() ? std::string(found->as_string().c_str())
                            : boost::json::serialize(*found);
}

// What a /status body says about getting ready, in one line.
std::string StatusLine(const std::string& body) {
  boost::system::error_code error;
  const boost::json::value json = boost::json::parse(body, error);
  if (error) return "";
  std::string line = TextOf(json, "/state");
  const std::string waiting = TextOf(json, "/reason");
  if (!waiting.empty() && waiting != "null" && waiting != "[]")
    absl::StrAppend(&line, ", ", waiting);
  boost::system::error_code none;
  const boost::json::value* workers = json.find_pointer("/workers", none);
  if (workers != nullptr && workers->is_array()) {
    for (const boost::json::value& worker : workers->as_array()) {
      const std::string state = TextOf(worker, "/state");
      absl::StrAppend(&line, "; rank ", TextOf(worker, "/rank"), " ", state);
      boost::system::error_code none_either;
      const boost::json::value* progress = worker.find_pointer("/progress", none_either);
      const double share =
          progress != nullptr && progress->is_number() ? progress->to_number<double>() : 0;
      if (state == "LOADING" && share > 0 && share < 1)
        absl::StrAppend(&line, absl::StrFormat(" %.0f %%", share * 100));
    }
  }
  return line;
}

// Where this machine reaches the gateway of a cluster with these settings.
std::string BaseUrlOf(const SettingsInForce& settings, int port) {
  const auto listen_addr = settings.find("LISTEN_ADDR");
  return LocalUrl({listen_addr == settings.end() ? "" : listen_addr->second, port});
}

// Follows the supervisor's reports and /status until the cluster is ready. Returns its base URL.
absl::StatusOr<std::string> WaitUntilReady(SupervisorHandle& supervisor,
                                           const SettingsInForce& settings,
                                           Progress& progress) {
  int port = 0;
  std::string pending;
  for (const int64_t give_up_ms = NowMs() + kReadyMsMax; NowMs() < give_up_ms;) {
    if (g_interrupted != 0) return absl::CancelledError("interrupted");
    const std::optional<std::string> reports = supervisor.ReadReports(100);
    pending += reports.value_or("");
    if (!reports.has_value() && pending.find("failed ") != 0)
      return absl::UnavailableError("the supervisor ended");
    if (pending.find("failed ") == 0) {
      for (std::optional<std::string> rest = ""; rest.has_value();
           rest = supervisor.ReadReports(2000)) {
        pending += *rest;
        if (rest->empty() && pending.size() > 7) break;
      }
      return absl::UnavailableError(std::string(absl::StripAsciiWhitespace(pending.substr(7))));
    }
    for (size_t end; (end = pending.find('\n')) != std::string::npos; pending.erase(0, end + 1)) {
      const std::string line = pending.substr(0, end);
      if (line.rfind("failed ", 0) == 0) break;
      if (line.rfind("listening ", 0) == 0) {
        port = std::atoi(line.c_str() + 10);
      } else {
        progress.Say(line);
      }
    }
    if (port == 0) continue;
    const std::string base = BaseUrlOf(settings, port);
    if (const auto status = HttpGet(base + "/status", 1000); status.ok())
      progress.Say(StatusLine(status->body));
    if (const auto ready = HttpGet(base + "/ready", 1000); ready.ok() && ready->status == 200)
      return base;
  }
  return absl::DeadlineExceededError(absl::StrCat("not ready after ", kReadyMsMax / 1000, " s"));
}

absl::StatusOr<ChatAnswer> Ask(const std::string& base,
                               const std::string& model,
                               const std::string& question,
                               int max_tokens) {
  std::cout << "\n> " << question << "\n" << std::flush;
  ASSIGN_OR_RETURN(const ChatAnswer answer,
                   AskChat(base, model, question, max_tokens,
                           [](std::string_view text) { std::cout << text << std::flush; }));
  std::cout << "\n  TTFT " << absl::StrFormat("%.0f ms", answer.ttft_ms);
  if (answer.tokens_per_second > 0)
    std::cout << absl::StrFormat(", %.0f tok/s", answer.tokens_per_second);
  std::cout << ", " << answer.completion_tokens << " tokens, " << answer.finish_reason << std::endl;
  return answer;
}

void PrintHowToUse(const std::string& base, const std::string& model, bool with_key) {
  std::cout
      << "\nThe cluster stays on " << base << " (stop it: deploy/quickstart.sh --stop). "
      << (with_key ? "Try, with one of your keys:\n\n" : "Try:\n\n") << "  curl -N " << base
      << "/v1/chat/completions -H 'Content-Type: application/json' "
      << (with_key ? "-H 'Authorization: Bearer ONE_OF_YOUR_KEYS' " : "") << "-d '"
      << R"({"model":")" << model
      << R"(","stream":true,"messages":[{"role":"user","content":"tell me a joke"}]})"
      << "'\n\n"
      << "from openai import OpenAI\n"
      << "client = OpenAI(base_url=\"" << base << "/v1\", api_key=\""
      << (with_key ? "ONE_OF_YOUR_KEYS" : "none") << "\")\n"
      << "answer = client.chat.completions.create(model=\"" << model
      << "\", messages=[{\"role\": \"user\", \"content\": \"What is the capital of France?\"}])\n"
      << "print(answer.choices[0].message.content)\n"
      << std::endl;
}

int Fail(const UpOptions& options, SupervisorHandle& supervisor, const absl::Status& why) {
  supervisor.End();
  std::cout << std::flush;
  std::cerr << "failed: " << why.message() << "\nnothing is left running; logs: " << options.run_dir
            << "/*.log\n";
  return g_interrupted != 0 ? kExitInterrupted : kExitUnavailable;
}

// Logs and state go into the run folder: without room every part would fail in its own words. The
// lock lasts as long as this process.
absl::Status ClaimRunDir(const std::string& run_dir) {
  struct statvfs system {};
  if (statvfs(run_dir.c_str(), &system) != 0) {
    return absl::UnavailableError(absl::StrCat("run folder ", run_dir, ": ", std::strerror(errno),
                                               "; give another one with --run-dir"));
  }
  const uint64_t free_bytes = uint64_t{system.f_bavail} * system.f_frsize;
  const bool has_files_left = system.f_files == 0 || system.f_favail > 0;
  if (free_bytes >= kRunDirBytesMin && has_files_left) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrFormat("run folder %s: its file system is full: %.1f of %.1f MiB and %d of %d files "
                      "are left, logs and "
                      "state need %d MiB; make room there or give another one with --run-dir",
                      run_dir, static_cast<double>(free_bytes) / (1 << 20),
                      static_cast<double>(uint64_t{system.f_blocks} * system.f_frsize) / (1 << 20),
                      system.f_favail, system.f_files, kRunDirBytesMin >> 20));
}

bool IsReady(const std::string& base) {
  return HttpGet(base + "/ready", 2000).value_or(HttpReply{}).status == 200;
}

// Names of what is not as asked; empty: the same cluster.
std::vector<std::string> Differences(const ClusterState& running,
                                     const UpOptions& options,
                                     const SettingsInForce& settings) {
  std::vector<std::string> different = DifferentKeys(running.settings, settings);
  if (running.build_id != BuildFingerprint(options.bin_dir)) different.emplace_back("the build");
  if (running.model_dir != options.model_dir) different.emplace_back("the model");
  if (running.tp != options.tp) different.emplace_back("TP");
  if (options.port.has_value() && *options.port != running.port) different.emplace_back("the port");
  return different;
}

// Completes `options` and the environment from the settings given, and checks these, before a
// running cluster is stopped for the new one.
absl::StatusOr<SettingsInForce> TakeSettings(UpOptions& options) {
  ASSIGN_OR_RETURN(const Settings settings, ReadGivenSettings());
  RETURN_IF_ERROR(CheckGivenSettings(settings, options.tp));
  if (options.model_dir.empty()) {
    options.model_dir =
        settings.IsSet("MODEL_DIR") ? AbsolutePath(settings.String("MODEL_DIR")) : options.demo_dir;
  }
  if (!options.port.has_value() && settings.Source("PORT") != "default")
    options.port = static_cast<int>(settings.Int("PORT"));
  PrepareEnvironment(settings, options.model_dir, options.smoke);
  return ReadSettingsInForce();
}

// Stops the running cluster, unless the new one cannot have its model or its port. Without a port
// of its own choice the new one gets that of the old.
absl::Status StopForAnother(const ClusterState& running,
                            const std::vector<std::string>& different,
                            UpOptions& options,
                            Progress& progress) {
  if (!options.port.has_value()) options.port = running.port;
  RETURN_IF_ERROR(LoadModelConfig(options.model_dir).status());
  if (*options.port != running.port) RETURN_IF_ERROR(CheckPortIsFree(*options.port));
  progress.Say(absl::StrCat(
      "replacing the cluster on port ", running.port, ": ",
      different.empty() ? "it is not ready" : absl::StrJoin(different, ", ") + " changed"));
  BringDown(options.run_dir);
  return absl::OkStatus();
}

}  // namespace

int BringUp(const UpOptions& asked) {
  Progress progress;
  UpOptions options = asked;
  mkdir(options.run_dir.c_str(), 0755);
  if (options.smoke) {  // beside whatever is running, never instead of it
    options.run_dir += "/smoke";
    mkdir(options.run_dir.c_str(), 0755);
    if (!options.port.has_value()) options.port = 0;
  }
  const absl::StatusOr<SettingsInForce> settings = TakeSettings(options);
  if (!settings.ok()) {
    std::cerr << "failed: " << settings.status().message() << "\n";
    return kExitBadConfig;
  }
  if (const absl::Status ready = ClaimRunDir(options.run_dir); !ready.ok()) {
    std::cerr << "failed: " << ready.message() << "\n";
    return kExitUnavailable;
  }
  CatchInterrupts();

  SupervisorHandle supervisor;
  std::string base;
  const absl::StatusOr<ClusterState> running = ReadClusterState(options.run_dir + "/cluster.json");
  const bool is_running = running.ok() && SupervisorRuns(*running);
  const std::vector<std::string> different =
      is_running ? Differences(*running, options, *settings) : std::vector<std::string>();
  const bool reuse =
      is_running && different.empty() && IsReady(BaseUrlOf(running->settings, running->port));
  if (reuse) {
    base = BaseUrlOf(running->settings, running->port);
    progress.Say(absl::StrCat("this build already serves this model with these settings on port ",
                              running->port));
  } else {
    if (is_running) {
      const absl::Status stopped = StopForAnother(*running, different, options, progress);
      if (!stopped.ok()) {
        std::cerr << "failed: " << stopped.message() << "; the running cluster stays\n";
        return kExitUnavailable;
      }
    }
    progress.Say(absl::StrCat("starting ", options.tp, " engram_service, ", options.tp,
                              " shard_worker, 1 gateway; model ", options.model_dir));
    if (const absl::Status started = supervisor.Start(options); !started.ok())
      return Fail(options, supervisor, started);
    const absl::StatusOr<std::string> ready = WaitUntilReady(supervisor, *settings, progress);
    if (!ready.ok()) return Fail(options, supervisor, ready.status());
    base = *ready;
  }
  progress.Say("ready on " + base);
  const absl::StatusOr<std::string> model = ServedModel(base);
  if (!model.ok()) return Fail(options, supervisor, model.status());
  const absl::StatusOr<ChatAnswer> answer = Ask(base, *model, kQuestion, 32);
  if (!answer.ok()) return Fail(options, supervisor, answer.status());
  if (options.smoke) {
    supervisor.End();
    const bool right = answer->text == kAnswer;
    std::cout << (right ? "smoke: ok, the cluster is stopped"
                        : "smoke: WRONG answer, expected 323; the cluster is stopped")
              << std::endl;
    return right ? kExitOk : 1;
  }
  if (const auto second = Ask(base, *model, kSecondQuestion, 160); !second.ok())
    return Fail(options, supervisor, second.status());
  if (g_interrupted != 0) return Fail(options, supervisor, absl::CancelledError("interrupted"));
  if (!reuse) supervisor.Release();
  PrintHowToUse(base, *model, settings->contains("API_KEY_FILE"));
  return kExitOk;
}

bool BringDown(const std::string& run_dir) {
  const absl::StatusOr<ClusterState> running = ReadClusterState(run_dir + "/cluster.json");
  if (!running.ok() || !SupervisorRuns(*running)) return false;
  std::cout << "stopping the cluster on port " << running->port
            << "; requests that run may finish for 20 s" << std::endl;
  kill(running->supervisor_pid, SIGTERM);
  const int64_t give_up_ms = NowMs() + kDownMsMax;
  while (SupervisorRuns(*running) && NowMs() < give_up_ms)
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  if (SupervisorRuns(*running))
    kill(running->supervisor_pid, SIGKILL);  // the parts follow by their lifelines
  unlink((run_dir + "/cluster.json").c_str());
  return true;
}

int PrintStatus(const std::string& run_dir, bool json) {
  const absl::StatusOr<ClusterState> running = ReadClusterState(run_dir + "/cluster.json");
  const bool is_running = running.ok() && SupervisorRuns(*running);
  const std::string base = is_running ? BaseUrlOf(running->settings, running->port) : "";
  absl::StatusOr<HttpReply> status = absl::UnavailableError("not running");
  if (is_running) status = HttpGet(base + "/status", 2000);
  if (json) {
    std::cout << (status.ok() ? status->body : std::string("{\"state\":\"STOPPED\"}")) << std::endl;
  } else if (!is_running) {
    std::cout << "no cluster of this checkout is running\n";
  } else {
    std::cout << "supervisor pid " << running->supervisor_pid << ", port " << running->port << ", "
              << (status.ok() ? StatusLine(status->body) : std::string(status.status().message()))
              << "\n";
  }
  if (!is_running) return kExitUnavailable;
  return IsReady(base) ? kExitOk : kExitUnavailable;
}

}  // namespace twinspark
