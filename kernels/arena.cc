// Host half of arena.h.
#include "kernels/arena.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace twinspark {

Arena::Arena(size_t bytes) : bytes_((bytes + kAlign - 1) / kAlign * kAlign) {
  owned_.reset(static_cast<char*>(std::aligned_alloc(kAlign, std::max(bytes_, kAlign))));
  CHECK(owned_ != nullptr) << "cannot allocate an arena of " << bytes_ << " bytes";
  std::memset(owned_.get(), 0, bytes_);
  base_ = owned_.get();
}

void* Arena::TakeBytes(size_t bytes) {
  const size_t rounded = (bytes + kAlign - 1) / kAlign * kAlign;
  CHECK_LE(used_ + rounded, bytes_)
      << "arena too small: the memory plan missed " << bytes << " bytes";
  char* taken = base_ + used_;
  used_ += rounded;
  peak_ = std::max(peak_, used_);
  return taken;
}

void Arena::Free::operator()(char* memory) const {
  std::free(memory);
}

}  // namespace twinspark
