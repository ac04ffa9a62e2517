// A sealed, mapped memfd: anonymous shared memory that the other side can neither shrink (no
// SIGBUS) nor grow. Move-only owner of mapping and descriptor. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

#include "engram_service/store/file_io.h"

namespace twinspark::engram {

class SharedMemory {
 public:
  // `bytes` zero bytes, all backed by memory now: running out of it is an error here, not a signal
  // later. Sealed against any change of size.
  static absl::StatusOr<SharedMemory> Create(const std::string& name, size_t bytes);

  SharedMemory() = default;
  SharedMemory(SharedMemory&& other) noexcept;
  SharedMemory& operator=(SharedMemory&& other) noexcept;
  ~SharedMemory();

  int fd() const { return fd_.get(); }
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }

 private:
  Fd fd_;
  uint8_t* data_ = nullptr;
  size_t size_ = 0;
};

}  // namespace twinspark::engram
