// Block buffers from one allocation, aligned for O_DIRECT and for registration with the kernel.
// Fixed size, so that reads never allocate. Thread-compatible: its reader's owner thread only.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace twinspark::engram {

class AlignedPool {
 public:
  // `count` buffers of 4096 bytes; the memory is populated now.
  explicit AlignedPool(size_t count);
  ~AlignedPool();
  AlignedPool(const AlignedPool&) = delete;
  AlignedPool& operator=(const AlignedPool&) = delete;

  size_t count() const { return count_; }
  size_t num_free() const { return free_.size(); }
  uint32_t Take();  // num_free() > 0
  void Give(uint32_t buffer);
  uint8_t* Data(uint32_t buffer) const { return base_ + size_t{buffer} * 4096; }
  std::span<uint8_t> memory() const { return {base_, count_ * 4096}; }

 private:
  size_t count_;
  size_t mapped_bytes_;
  uint8_t* base_;
  std::vector<uint32_t> free_;
};

}  // namespace twinspark::engram
