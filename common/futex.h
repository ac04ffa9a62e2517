// Waiting on a 32-bit word that another process changes: the row ring's completion words. Shared
// (not private) futexes, so that both sides may map the word at different addresses. Thread-safe.
#pragma once

#include <cstdint>
#include <ctime>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace twinspark {

// Sleeps while *word == expected, at most timeout_ns; also returns early without a reason, so the
// caller looks at the word again.
inline void FutexWait(const uint32_t* word, uint32_t expected, int64_t timeout_ns) {
  const timespec timeout = {timeout_ns / 1'000'000'000, timeout_ns % 1'000'000'000};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &timeout, nullptr, 0);
}

inline void FutexWakeAll(const uint32_t* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

}  // namespace twinspark
