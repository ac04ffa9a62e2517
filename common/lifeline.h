// A child's tie to whoever started it: the read end of a pipe. When the other end closes (the
// starter ended, for whatever reason, SIGKILL included), the process ends at once. So nothing is
// left behind, and no pid file is needed for it.
#pragma once

#include <thread>

namespace twinspark {

class Lifeline {
 public:
  // Watches `fd` on a thread of its own; -1 watches nothing. When it closes: one log line, then
  // _exit(130).
  explicit Lifeline(int fd);
  ~Lifeline();
  Lifeline(const Lifeline&) = delete;
  Lifeline& operator=(const Lifeline&) = delete;

 private:
  int fd_;
  int stop_pipe_[2] = {-1, -1};
  std::thread thread_;
};

}  // namespace twinspark
