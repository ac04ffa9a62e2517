// pread and pwrite loops that retry EINTR and treat an early end of file as damage.
#include "engram_service/store/file_io.h"

#include <cerrno>
#include <cstring>

#include <fcntl.h>
#include <sys/stat.h>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"

namespace twinspark::engram {

absl::Status ErrnoStatus(int error_number, const std::string& what) {
  const std::string text = absl::StrCat(what, ": ", strerror(error_number));
  switch (error_number) {
    case ENOENT:
      return absl::NotFoundError(text);
    case ENOSPC:
    case ENOMEM:
    case EDQUOT:
      return absl::ResourceExhaustedError(text);
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(text);
    case EIO:
      return absl::DataLossError(text);
    default:
      return absl::UnavailableError(text);
  }
}

bool FileExists(const std::string& path) {
  return access(path.c_str(), F_OK) == 0;
}

absl::StatusOr<uint64_t> FileSize(int fd, const std::string& path) {
  struct stat info;
  if (fstat(fd, &info) != 0) return ErrnoStatus(errno, path);
  return static_cast<uint64_t>(info.st_size);
}

absl::Status ReadExactly(int fd,
                         uint64_t offset,
                         std::span<uint8_t> bytes,
                         const std::string& path) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n =
        pread(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return ErrnoStatus(errno, absl::StrCat(path, " at ", offset + done));
    if (n == 0) {
      return absl::DataLossError(absl::StrCat(path, " ends at ", offset + done, "; expected ",
                                              bytes.size() - done, " more bytes"));
    }
    done += static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

absl::Status WriteExactly(int fd,
                          uint64_t offset,
                          std::span<const uint8_t> bytes,
                          const std::string& path) {
  size_t done = 0;
  while (done < bytes.size()) {
    const ssize_t n =
        pwrite(fd, bytes.data() + done, bytes.size() - done, static_cast<off_t>(offset + done));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return ErrnoStatus(n == 0 ? ENOSPC : errno, absl::StrCat(path, " at ", offset));
    done += static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<uint8_t>> ReadWholeFile(const std::string& path, size_t max_bytes) {
  const Fd fd(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (!fd.valid()) return ErrnoStatus(errno, path);
  ASSIGN_OR_RETURN(const uint64_t size, FileSize(fd.get(), path));
  if (size > max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " has ", size, " bytes; at most ", max_bytes, " are expected"));
  }
  std::vector<uint8_t> bytes(size);
  RETURN_IF_ERROR(ReadExactly(fd.get(), 0, bytes, path));
  return bytes;
}

}  // namespace twinspark::engram
