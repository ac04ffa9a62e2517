// When to give up an encoding that nobody can use: more ids than any request may have, or a client
// that has gone. Asked between pieces, and every few kilobytes inside a long one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace twinspark::gateway {

// Thread-compatible; `cancelled` may be set by any thread.
struct EncodeBudget {
  size_t max_ids = SIZE_MAX;                     // of the whole list that is appended to
  const std::atomic<bool>* cancelled = nullptr;  // null: never

  bool Allows(size_t num_ids) const {
    return num_ids <= max_ids &&
           (cancelled == nullptr || !cancelled->load(std::memory_order_relaxed));
  }
};

}  // namespace twinspark::gateway
