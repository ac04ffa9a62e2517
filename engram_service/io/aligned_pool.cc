// One anonymous mapping. A mapping that cannot be had at start is fatal for the caller's process
// start, so it is a CHECK with the size.
#include "engram_service/io/aligned_pool.h"

#include <sys/mman.h>

#include "common/check.h"

namespace twinspark::engram {

AlignedPool::AlignedPool(size_t count) : count_(count), mapped_bytes_(count * 4096) {
  void* memory = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  CHECK(memory != MAP_FAILED) << "cannot map " << mapped_bytes_ << " bytes of read buffers";
  base_ = static_cast<uint8_t*>(memory);
  for (size_t i = count; i > 0; --i)
    free_.push_back(static_cast<uint32_t>(i - 1));
}

AlignedPool::~AlignedPool() {
  munmap(base_, mapped_bytes_);
}

uint32_t AlignedPool::Take() {
  CHECK(!free_.empty());
  const uint32_t buffer = free_.back();
  free_.pop_back();
  return buffer;
}

void AlignedPool::Give(uint32_t buffer) {
  DCHECK(buffer < count_ && free_.size() < count_);
  free_.push_back(buffer);
}

}  // namespace twinspark::engram
