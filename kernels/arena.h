// A bump allocator for scratch of one step: planned once, then no allocation in the step loop.
// Take() CHECKs that the planned size suffices (the memory plan of the caller is wrong otherwise).
// Scope gives back what was taken after it. Not thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/check.h"

namespace twinspark {

class Arena {
 public:
  static constexpr size_t kAlign = 64;  // one cache line; also enough for AVX-512 loads

  // Owns `bytes` of zeroed host memory.
  explicit Arena(size_t bytes);
  // Borrows memory of another kind (device memory).
  Arena(void* memory, size_t bytes) : base_(static_cast<char*>(memory)), bytes_(bytes) {}
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  template <class T>
  T* Take(int64_t count) {
    return static_cast<T*>(TakeBytes(static_cast<size_t>(count) * sizeof(T)));
  }
  void* TakeBytes(size_t bytes);

  size_t used_bytes() const { return used_; }
  size_t peak_bytes() const { return peak_; }
  size_t capacity_bytes() const { return bytes_; }

  // Gives everything taken during its life back when it goes out of scope.
  class Scope {
   public:
    explicit Scope(Arena& arena) : arena_(arena), mark_(arena.used_) {}
    ~Scope() { arena_.used_ = mark_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Arena& arena_;
    size_t mark_;
  };

 private:
  struct Free {
    void operator()(char* memory) const;
  };
  std::unique_ptr<char, Free> owned_;
  char* base_ = nullptr;
  size_t bytes_ = 0;
  size_t used_ = 0;
  size_t peak_ = 0;
};

}  // namespace twinspark
