// A child that cannot outlive us: it holds the read end of a lifeline pipe, gets SIGKILL when we
// die (also when it is stopped), and is killed and reaped by the destructor. Output goes to a log
// file. Thread-compatible; start from the main thread, since the kernel ties the death signal to
// the starting thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include <sys/types.h>

#include "absl/status/statusor.h"

namespace twinspark {

class ChildProcess {
 public:
  struct Options {
    std::string name;               // for messages
    std::vector<std::string> argv;  // argv[0] is the program's path; `--lifeline-fd N` is appended
    std::string log_path;           // stdout and stderr, truncated
  };

  static absl::StatusOr<ChildProcess> Start(const Options& options);
  ChildProcess(ChildProcess&& other) noexcept;
  ChildProcess& operator=(ChildProcess&& other) = delete;
  ~ChildProcess();

  const std::string& name() const { return name_; }
  const std::string& log_path() const { return log_path_; }
  pid_t pid() const { return pid_; }

  // "exited with code 65", "was ended by signal 9", or nullopt while it runs. Reaps at the first
  // non-null answer.
  std::optional<std::string> ExitText();
  bool running() { return !ExitText().has_value(); }

  void Signal(int number);

 private:
  ChildProcess(std::string name, std::string log_path, pid_t pid, int lifeline)
      : name_(std::move(name)), log_path_(std::move(log_path)), pid_(pid), lifeline_(lifeline) {}

  std::string name_;
  std::string log_path_;
  pid_t pid_ = -1;
  int lifeline_ = -1;  // write end
  std::optional<std::string> exit_text_;
};

// The last `lines` lines of a log file, for messages about a failure.
std::string TailOfFile(const std::string& path, int lines);

}  // namespace twinspark
