// memfd_create, fallocate, seal, map: in this order, because seals forbid the others.
#include "engram_service/shm/shared_memory.h"

#include <cerrno>
#include <utility>

#include <fcntl.h>
#include <sys/mman.h>

#include "absl/strings/str_cat.h"

namespace twinspark::engram {

absl::StatusOr<SharedMemory> SharedMemory::Create(const std::string& name, size_t bytes) {
  SharedMemory memory;
  memory.fd_ = Fd(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!memory.fd_.valid()) return ErrnoStatus(errno, "memfd_create");
  const int error = posix_fallocate(memory.fd_.get(), 0, static_cast<off_t>(bytes));
  if (error != 0) {
    return ErrnoStatus(error, absl::StrCat("shared memory of ", bytes, " bytes for ", name));
  }
  if (fcntl(memory.fd_.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
    return ErrnoStatus(errno, "sealing shared memory");
  }
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory.fd_.get(), 0);
  if (data == MAP_FAILED) return ErrnoStatus(errno, absl::StrCat("mapping ", bytes, " bytes"));
  memory.data_ = static_cast<uint8_t*>(data);
  memory.size_ = bytes;
  return memory;
}

SharedMemory::SharedMemory(SharedMemory&& other) noexcept
    : fd_(std::move(other.fd_)),
      data_(std::exchange(other.data_, nullptr)),
      size_(std::exchange(other.size_, 0)) {}

SharedMemory& SharedMemory::operator=(SharedMemory&& other) noexcept {
  if (this != &other) {
    if (data_ != nullptr) munmap(data_, size_);
    fd_ = std::move(other.fd_);
    data_ = std::exchange(other.data_, nullptr);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

SharedMemory::~SharedMemory() {
  if (data_ != nullptr) munmap(data_, size_);
}

}  // namespace twinspark::engram
