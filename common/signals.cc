// See signals.h.
#include "common/signals.h"

#include <csignal>
#include <thread>

#include <unistd.h>

#include "common/check.h"

namespace twinspark {
namespace {

sigset_t StopSignals() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGTERM);
  sigaddset(&set, SIGINT);
  return set;
}

}  // namespace

void BlockStopSignals() {
  const sigset_t set = StopSignals();
  CHECK_EQ(pthread_sigmask(SIG_BLOCK, &set, nullptr), 0);
  std::signal(SIGPIPE, SIG_IGN);
}

int WaitForStopSignal() {
  const sigset_t set = StopSignals();
  int number = 0;
  CHECK_EQ(sigwait(&set, &number), 0);
  return number;
}

void ExitOnNextStopSignal() {
  std::thread([] {
    WaitForStopSignal();
    _exit(130);
  }).detach();
}

}  // namespace twinspark
