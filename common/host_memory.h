// What the machine says about its memory. Any thread.
#pragma once

#include <cstdint>

namespace twinspark {

// MemTotal and MemAvailable of /proc/meminfo in bytes; 0 where it does not say.
struct HostMemory {
  uint64_t total_bytes = 0;
  uint64_t available_bytes = 0;
};
HostMemory ReadHostMemory();

}  // namespace twinspark
