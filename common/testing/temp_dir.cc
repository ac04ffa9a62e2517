// See temp_dir.h.
#include "common/testing/temp_dir.h"

#include <cerrno>
#include <cstdlib>
#include <cstring>

#include <unistd.h>

#include "common/check.h"

namespace twinspark {

TempDir::TempDir(const std::filesystem::path& parent) {
  std::string name = (parent / "twinspark_XXXXXX").string();
  CHECK(mkdtemp(name.data()) != nullptr) << name << ": " << strerror(errno);
  path_ = name;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::filesystem::path InMemory() {
  if (access("/dev/shm", W_OK) == 0) return "/dev/shm";
  return std::filesystem::temp_directory_path();
}

}  // namespace twinspark
