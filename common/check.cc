// The cold half of check.h.
#include "common/check.h"

#include <cstdlib>

#include <unistd.h>

namespace twinspark::internal {

void CheckFailed(const char* file, int line, const char* text, const std::string& values) {
  std::ostringstream out;
  out << file << ":" << line << " check failed: " << text << " " << values << "\n";
  const std::string message = out.str();
  [[maybe_unused]] const ssize_t written = write(STDERR_FILENO, message.data(), message.size());
  std::abort();
}

}  // namespace twinspark::internal
