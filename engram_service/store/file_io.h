// Small file helpers: an owned descriptor and whole-file reads with a bound. Bulk data goes through
// engram_service/io. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace twinspark::engram {

// Owns a file descriptor.
class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    if (this != &other) {
      Reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~Fd() { Reset(); }

  int get() const { return fd_; }
  bool valid() const { return fd_ >= 0; }
  int Release() { return std::exchange(fd_, -1); }
  void Reset() {
    if (fd_ >= 0) close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

// "path: what: strerror" with the code that fits errno.
absl::Status ErrnoStatus(int error_number, const std::string& what);

bool FileExists(const std::string& path);
absl::StatusOr<uint64_t> FileSize(int fd, const std::string& path);

// Whole content; refuses files above `max_bytes`.
absl::StatusOr<std::vector<uint8_t>> ReadWholeFile(const std::string& path, size_t max_bytes);

// Exactly bytes.size() bytes at `offset`; a short file is DATA_LOSS.
absl::Status ReadExactly(int fd,
                         uint64_t offset,
                         std::span<uint8_t> bytes,
                         const std::string& path);
absl::Status WriteExactly(int fd,
                          uint64_t offset,
                          std::span<const uint8_t> bytes,
                          const std::string& path);

}  // namespace twinspark::engram
