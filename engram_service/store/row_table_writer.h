// The packer: writes one EGPACK01 file from a table of any format so that a crash at any byte
// leaves either no final file or a whole one. Rows are read, laid out and written in extents of 16
// MiB by a line of threads; a journal remembers what is durable, so that a second run goes on where
// the first one ended; nothing gets the final name before every page was read back and compared.
// Spec: engram.md 3.4. Caller: pack_rows.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

#include "engram_service/store/hasher.h"
#include "engram_service/store/native_table.h"
#include "engram_service/store/pack_files.h"
#include "engram_service/store/row_format.h"
#include "engram_service/store/row_table.h"

namespace twinspark::engram {

struct PackProgress {
  const char* phase = "";  // "pack", "verify", "compare"
  uint64_t bytes_done = 0;
  uint64_t bytes_total = 0;
};

struct PackOptions {
  std::string out_dir;
  PackTarget target;
  bool compare_all_rows = false;  // else one row per extent and the borders of every column
  uint64_t bytes_per_second = 0;  // 0 = as fast as it goes
  size_t extents_per_sync = 16;   // at most this much is packed again after a crash
  uint64_t created_unix = 0;
  std::function<void(const PackProgress&)> progress;  // one call at a time, any thread
};

struct PackResult {
  std::string path;
  bool already_there = false;
  uint64_t pages = 0;
  uint64_t extents = 0;
  uint64_t extents_resumed = 0;  // taken over from an interrupted run
  uint64_t rows_compared = 0;
  double pack_seconds = 0;
  double verify_seconds = 0;
  uint64_t packed_bytes = 0;   // written in this run
  uint32_t largest_scale = 0;  // exponent byte, over all rows packed in this run
};

// What the header says about the source.
struct PackSource {
  Sha256Digest index_digest{};
  Sha256Digest header_digest{};
  uint64_t weight_offset = 0;
  uint64_t scale_offset = 0;
};
PackSource SourceOf(const NativeTable& table);

// `source` holds all columns of the target. Fails with the offset for unreadable source bytes, with
// the row for NaN codes and scale 255, when another packer holds the lock, or when the file system
// is full (before anything is written).
absl::StatusOr<PackResult> PackTable(const RowTable& source,
                                     const PackSource& provenance,
                                     const Hasher& hasher,
                                     int layer_idx,
                                     const PackOptions& options,
                                     PackFiles& files);

}  // namespace twinspark::engram
