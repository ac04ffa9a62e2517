// Every system call that the packer changes the disk with, so that tests can fail or kill it at any
// of them. The default does what the names say. Thread-safe when called for different ranges.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"

namespace twinspark::engram {

class PackFiles {
 public:
  virtual ~PackFiles() = default;
  virtual absl::Status Allocate(int fd, uint64_t bytes, const std::string& path);
  virtual absl::Status Write(int fd,
                             uint64_t offset,
                             std::span<const uint8_t> bytes,
                             const std::string& path);
  virtual absl::Status Read(int fd,
                            uint64_t offset,
                            std::span<uint8_t> bytes,
                            const std::string& path);
  virtual absl::Status Sync(int fd, const std::string& path);
  virtual absl::Status Truncate(int fd, uint64_t bytes, const std::string& path);
  // Renames and makes the directory entry durable.
  virtual absl::Status Rename(const std::string& from, const std::string& to);
  virtual absl::Status Unlink(const std::string& path);
};

}  // namespace twinspark::engram
