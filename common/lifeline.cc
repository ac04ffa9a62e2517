// See lifeline.h.
#include "common/lifeline.h"

#include <cerrno>

#include <poll.h>
#include <unistd.h>

#include "common/check.h"
#include "common/log.h"

namespace twinspark {

Lifeline::Lifeline(int fd) : fd_(fd) {
  if (fd_ < 0) return;
  CHECK_EQ(pipe(stop_pipe_), 0);
  thread_ = std::thread([this] {
    while (true) {
      pollfd fds[2] = {{fd_, POLLIN, 0}, {stop_pipe_[0], POLLIN, 0}};
      if (poll(fds, 2, -1) < 0 && errno == EINTR) continue;
      if (fds[1].revents != 0) return;
      char byte = 0;
      if (fds[0].revents != 0 && read(fd_, &byte, 1) <= 0) {
        LOG_WARNING << "the process that started this one is gone: ending";
        _exit(130);
      }
    }
  });
}

Lifeline::~Lifeline() {
  if (fd_ < 0) return;
  close(stop_pipe_[1]);
  thread_.join();
  close(stop_pipe_[0]);
}

}  // namespace twinspark
