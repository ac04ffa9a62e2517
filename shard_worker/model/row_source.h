// Where the Engram rows of a step come from: token ids in, raw table rows out. The source hashes;
// the model never sees row numbers. Implementations: the shared-memory client of the row service
// (shard_worker/engram) and, for tests and golden programs, one over the tables in this process.
//
// A rank asks for its own columns only: heads [rank*H/world, (rank+1)*H/world) of every n-gram
// order (H = engram_n_heads), in ascending column order, column = (order-2)*H + head. The model
// gathers the other ranks' columns itself. Threading: step thread only; one request is alive at a
// time.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace twinspark {

// Consecutive tokens of one sequence.
struct RowRange {
  int slot = 0;
  int64_t first_position = 0;
  // The ids before first_position: exactly min(3, first_position) of them, oldest first.
  std::span<const int32_t> history;
  std::span<const int32_t> ids;
  // 1 for tokens of image spans, over history and then ids; empty when there are none.
  std::span<const uint8_t> dead;
};

// Rows of all tokens of a request, in the order of the ranges. Values are the table's bytes.
// A dead token has zero bytes with scale byte 127.
struct EngramRows {
  const uint8_t* values = nullptr;  // e4m3 [tokens][owned columns][engram_head_dim]
  const uint8_t* scales = nullptr;  // e8m0 [tokens][owned columns][engram_head_dim / 32]
};

// How urgent a request or hint is. kAhead is for hints only: it gives way to everything else.
enum class RowClass : uint8_t { kDecode = 0, kBulk = 1, kAhead = 2 };

class RowSource {
 public:
  virtual ~RowSource() = default;

  // Starts reading for all Engram layers; the ranges are copied. Replaces the request before.
  virtual absl::Status Request(std::span<const RowRange> ranges, RowClass row_class) = 0;

  // Rows that will probably be asked for soon and may be read ahead; the ranges are copied. Bounded
  // and dropped first: no error, no wait, and no byte of any row depends on it.
  virtual void Hint(std::span<const RowRange> /*ranges*/, RowClass /*row_class*/) {}

  // Waits for the rows of module `module_idx` (index into engram_layer_ids) of the last request.
  // The pointers hold until the next Request. DEADLINE_EXCEEDED after one second, never zeros.
  virtual absl::StatusOr<EngramRows> Rows(int module_idx) = 0;
};

}  // namespace twinspark
