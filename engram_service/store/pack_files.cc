// The plain versions.
#include "engram_service/store/pack_files.h"

#include <cerrno>
#include <cstdio>
#include <filesystem>

#include <fcntl.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

#include "common/status_macros.h"
#include "engram_service/store/file_io.h"

namespace twinspark::engram {

absl::Status PackFiles::Allocate(int fd, uint64_t bytes, const std::string& path) {
  const int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes));
  if (error == 0) return absl::OkStatus();
  return ErrnoStatus(error, absl::StrCat(path, ": ", bytes, " bytes"));
}

absl::Status PackFiles::Write(int fd,
                              uint64_t offset,
                              std::span<const uint8_t> bytes,
                              const std::string& path) {
  return WriteExactly(fd, offset, bytes, path);
}

absl::Status PackFiles::Read(int fd,
                             uint64_t offset,
                             std::span<uint8_t> bytes,
                             const std::string& path) {
  return ReadExactly(fd, offset, bytes, path);
}

absl::Status PackFiles::Sync(int fd, const std::string& path) {
  return fdatasync(fd) == 0 ? absl::OkStatus() : ErrnoStatus(errno, path);
}

absl::Status PackFiles::Truncate(int fd, uint64_t bytes, const std::string& path) {
  return ftruncate(fd, static_cast<off_t>(bytes)) == 0 ? absl::OkStatus()
                                                       : ErrnoStatus(errno, path);
}

absl::Status PackFiles::Rename(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) != 0) return ErrnoStatus(errno, from);
  const std::string parent = std::filesystem::path(to).parent_path().string();
  const Fd dir(open(parent.empty() ? "." : parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!dir.valid() || fsync(dir.get()) != 0) return ErrnoStatus(errno, parent);
  return absl::OkStatus();
}

absl::Status PackFiles::Unlink(const std::string& path) {
  return unlink(path.c_str()) == 0 || errno == ENOENT ? absl::OkStatus() : ErrnoStatus(errno, path);
}

}  // namespace twinspark::engram
