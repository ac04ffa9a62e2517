// See child_process.h.
#include "deploy/local_cluster/child_process.h"

#include <cerrno>
#include <csignal>
#include <cstring>
#include <deque>
#include <fstream>

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace twinspark {
namespace {

// In the child, between fork and exec: only async-signal-safe calls.
[[noreturn]] void ExecChild(char* const* argv, int log_fd, int lifeline, pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) _exit(130);  // the parent died before the line above
  sigset_t none;
  sigemptyset(&none);
  pthread_sigmask(SIG_SETMASK, &none, nullptr);
  setpgid(0, 0);  // a Ctrl-C at the terminal reaches us alone; we end the children in order
  const int null_fd = open("/dev/null", O_RDONLY);
  dup2(null_fd, STDIN_FILENO);
  dup2(log_fd, STDOUT_FILENO);
  dup2(log_fd, STDERR_FILENO);
  fcntl(lifeline, F_SETFD, 0);
  execv(argv[0], argv);
  _exit(127);
}

}  // namespace

absl::StatusOr<ChildProcess> ChildProcess::Start(const Options& options) {
  const int log_fd =
      open(options.log_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND | O_CLOEXEC, 0644);
  if (log_fd < 0)
    return absl::UnavailableError(
        absl::StrCat(options.log_path, ": cannot be written: ", std::strerror(errno)));
  int lifeline[2];
  if (pipe2(lifeline, O_CLOEXEC) != 0) {
    close(log_fd);
    return absl::UnavailableError(
        absl::StrCat("no pipe for ", options.name, ": ", std::strerror(errno)));
  }
  std::vector<std::string> arguments = options.argv;
  arguments.push_back("--lifeline-fd");
  arguments.push_back(absl::StrCat(lifeline[0]));
  std::vector<char*> argv;
  for (std::string& argument : arguments)
    argv.push_back(argument.data());
  argv.push_back(nullptr);
  const pid_t parent = getpid();
  const pid_t pid = fork();
  if (pid == 0) ExecChild(argv.data(), log_fd, lifeline[0], parent);
  close(log_fd);
  close(lifeline[0]);
  if (pid < 0) {
    close(lifeline[1]);
    return absl::UnavailableError(
        absl::StrCat("cannot start ", options.name, ": ", std::strerror(errno)));
  }
  return ChildProcess(options.name, options.log_path, pid, lifeline[1]);
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : name_(std::move(other.name_)),
      log_path_(std::move(other.log_path_)),
      pid_(std::exchange(other.pid_, -1)),
      lifeline_(std::exchange(other.lifeline_, -1)),
      exit_text_(std::move(other.exit_text_)) {}

ChildProcess::~ChildProcess() {
  if (lifeline_ >= 0) close(lifeline_);
  if (pid_ < 0 || exit_text_.has_value()) return;
  kill(pid_, SIGKILL);
  waitpid(pid_, nullptr, 0);
}

std::optional<std::string> ChildProcess::ExitText() {
  if (exit_text_.has_value() || pid_ < 0) return exit_text_;
  int status = 0;
  if (waitpid(pid_, &status, WNOHANG) != pid_) return std::nullopt;
  if (WIFEXITED(status) && WEXITSTATUS(status) == 127) {
    exit_text_ = "could not be started (exit code 127: is the program there?)";
  } else if (WIFEXITED(status)) {
    exit_text_ = absl::StrCat("exited with code ", WEXITSTATUS(status));
  } else {
    exit_text_ = absl::StrCat("was ended by signal ", WTERMSIG(status));
  }
  return exit_text_;
}

void ChildProcess::Signal(int number) {
  if (running()) kill(pid_, number);
}

std::string TailOfFile(const std::string& path, int lines) {
  std::ifstream file(path);
  std::deque<std::string> tail;
  for (std::string line; std::getline(file, line);) {
    tail.push_back(line);
    if (tail.size() > static_cast<size_t>(lines)) tail.pop_front();
  }
  std::string text;
  for (const std::string& line : tail)
    absl::StrAppend(&text, "    ", line, "\n");
  return text;
}

}  // namespace twinspark
