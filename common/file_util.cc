// See file_util.h.
#include "common/file_util.h"

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>

#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

#include "common/string_view.h"

namespace twinspark {

absl::StatusOr<std::string> ReadFile(const std::string& path, size_t max_bytes) {
  struct stat info {};
  if (stat(path.c_str(), &info) != 0)
    return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  if (!S_ISREG(info.st_mode))
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  if (static_cast<size_t>(info.st_size) > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", info.st_size, " bytes, more than ", max_bytes));
  }
  std::ifstream file(path, std::ios::binary);
  std::string content(static_cast<size_t>(info.st_size), '\0');
  if (!file.read(content.data(), info.st_size))
    return absl::DataLossError(
        absl::StrCat(path, ": short read, expected ", info.st_size, " bytes"));
  return content;
}

absl::Status WriteFileAtomically(const std::string& path, std::string_view content) {
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".new");
  {
    std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
    file.write(content.data(), static_cast<std::streamsize>(content.size()));
    file.flush();
    if (!file)
      return absl::UnavailableError(
          absl::StrCat(temporary, ": cannot be written: ", std::strerror(errno)));
  }
  if (std::rename(temporary.c_str(), path.c_str()) != 0) {
    return absl::UnavailableError(
        absl::StrCat(path, ": cannot be replaced: ", std::strerror(errno)));
  }
  return absl::OkStatus();
}

}  // namespace twinspark
