// See host_memory.h.
#include "common/host_memory.h"

#include <fstream>
#include <string>

namespace twinspark {

HostMemory ReadHostMemory() {
  HostMemory memory;
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::string unit;
  uint64_t kib = 0;
  while (file >> key >> kib) {
    if (key == "MemTotal:") memory.total_bytes = kib << 10;
    if (key == "MemAvailable:") memory.available_bytes = kib << 10;
    std::getline(file, unit);
  }
  return memory;
}

}  // namespace twinspark
